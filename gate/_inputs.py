"""Quantized activations and KV caches as the engines compute them, hooked into a `Model`. Training has its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gate.readers import InputQuant
from gate.readers._export import BLOCK
from qat.arch import Arch
from qat.fakequant import attach_cache

CacheScales = Callable[[int], tuple[Tensor, Tensor] | None]
LARGEST = torch.finfo(torch.float8_e4m3fn).max
SMALLEST_SCALE = 1 / (512 * LARGEST)  # vLLM's floor of a dynamic scale, far below any real activation


def quantize_input(x: Tensor, how: InputQuant) -> Tensor:
    """Activations (..., K) rounded and back, saturating: to fp8 or int8 with a scale for each token, to fp8 with one
    for each 128 inputs of a token, or to fp8 with a static scale."""
    if how is None:
        return x
    if isinstance(how, Tensor):
        return _to_fp8(x.float(), how.to(x.device)).to(x.dtype)
    if how == "group":
        parts = [_to_fp8(part, _largest(part) / LARGEST) for part in x.float().split(BLOCK, -1)]
        return torch.cat(parts, -1).to(x.dtype)
    if how == "token":
        return _to_fp8(x.float(), _largest(x) / LARGEST).to(x.dtype)
    scale = _largest(x) / 127  # vLLM scales to -127..127
    return (torch.round(x.float() / scale.clamp_min(SMALLEST_SCALE)) * scale).to(x.dtype)


def _largest(x: Tensor) -> Tensor:
    return x.detach().abs().amax(-1, keepdim=True).float()


def _to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    scale = scale.clamp_min(SMALLEST_SCALE)
    return torch.clamp(x / scale, -LARGEST, LARGEST).to(torch.float8_e4m3fn).float() * scale


class Cache:
    """In place of the cache that transformers hands attention: what it stores comes back rounded to fp8."""

    def __init__(self, key_scale: Tensor, value_scale: Tensor) -> None:
        self.scales = key_scale, value_scale

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        back = [quantize_input(x, scale) for x, scale in zip((keys, values), self.scales, strict=True)]
        return back[0], back[1]


def hooks(
    arch: Arch, input_quant: Callable[[str], InputQuant] | None, cache_scales: CacheScales | None = None
) -> Callable[[int, nn.Module], None]:
    """The `prepare` of a `Model`: hooks on its quantized linears and caches, set once however often a block is loaded.

    cache_scales: of keys and values by the index of a block, each one float32 value; None where nothing is rounded.
    """
    done: set[int] = set()

    def prepare(index: int, block: nn.Module) -> None:
        if index in done:
            return
        done.add(index)
        for leaf in arch.at(index).linears:
            how = input_quant(f"{arch.blocks}.{index}.{leaf}") if input_quant else None
            if how is not None:
                block.get_submodule(leaf).register_forward_pre_hook(_hook(how))
        scales = cache_scales(index) if cache_scales else None
        if scales is not None:
            attach_cache(block.get_submodule("self_attn"), Cache(*scales))

    return prepare


def _hook(how: InputQuant) -> Callable[[nn.Module, Any], Any]:
    return lambda module, args: (quantize_input(args[0], how), *args[1:])
