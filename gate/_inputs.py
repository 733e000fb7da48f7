"""fp8 activations as the engines compute them, put into a `Model` as hooks. Training has its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gate.readers import InputQuant
from qat.arch import Arch

LARGEST = torch.finfo(torch.float8_e4m3fn).max
SMALLEST_SCALE = 1 / (512 * LARGEST)  # vLLM's floor of a dynamic scale, far below any real activation


def quantize_input(x: Tensor, how: InputQuant) -> Tensor:
    """Activations (..., K) rounded to fp8 and back: scaled per token, or with a static scale; saturating."""
    if how is None:
        return x
    if isinstance(how, Tensor):
        scale = how.to(x.device)
    else:
        scale = (x.detach().abs().amax(-1, keepdim=True).float() / LARGEST).clamp_min(SMALLEST_SCALE)
    codes = torch.clamp(x.float() / scale, -LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return (codes.float() * scale).to(x.dtype)


def hooks(arch: Arch, input_quant: Callable[[str], InputQuant]) -> Callable[[int, nn.Module], None]:
    """The `prepare` of a `Model`: hooks on its quantized linears, set once however often a block is loaded."""
    done: set[int] = set()

    def prepare(index: int, block: nn.Module) -> None:
        if index in done:
            return
        done.add(index)
        for leaf in arch.at(index).linears:
            how = input_quant(f"{arch.blocks}.{index}.{leaf}")
            if how is not None:
                block.get_submodule(leaf).register_forward_pre_hook(_hook(how))

    return prepare


def _hook(how: InputQuant) -> Callable[[nn.Module, Any], Any]:
    return lambda module, args: (quantize_input(args[0], how), *args[1:])
