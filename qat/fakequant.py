"""A linear whose codes are frozen and whose bias and scales are learned: y = x W(scale)^T + bias.

The forward pass uses exactly what will be exported: scale and bias rounded to the shared 16-bit grid, the gradient
passed straight through the rounding (Bengio, Leonard and Courville 2013). Without learned scales the weight is
dequantized once; no gradient of the weight is ever formed for bias training.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from qat.quant import Quantized, dequantize, fake_quant_cache, fake_quant_input, grouped, signed_codes
from qat.scheme import TensorFormat


class OnGrid(torch.autograd.Function):
    """`quant.to_grid` without its check (which would stall a GPU at every step); the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.bfloat16().half().float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class FakeQuantInput(torch.autograd.Function):
    """Activations as the engine sees them; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fmt: TensorFormat, input_scale: Tensor | None) -> Tensor:
        return fake_quant_input(x, fmt, input_scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class FakeQuantCache(torch.autograd.Function):
    """Keys or values as they come back from an fp8 KV cache; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        return fake_quant_cache(x, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class QuantizedCache:
    """Stands in for the cache that transformers hands an attention module: keeps nothing, rounds what is put in.

    k_scale, v_scale: float32 (1,). Attention puts keys in after the rotary embedding, as they are stored.
    """

    def __init__(self, k_scale: Tensor, v_scale: Tensor) -> None:
        self.k_scale, self.v_scale = k_scale, v_scale

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return FakeQuantCache.apply(keys, self.k_scale), FakeQuantCache.apply(values, self.v_scale)


def attach_cache(attention: nn.Module, cache: Any) -> RemovableHandle:
    """Let every call of an attention module of transformers use `cache`, whose `update(keys, values, ...)` gets them as
    they would be stored, (batch, heads, length, head size), and gives what attention goes on with.

    Raises ValueError when the module takes no cache under a known name: another would be ignored there.
    """
    names = inspect.signature(attention.forward).parameters
    known = [name for name in ("cache", "past_key_values") if name in names]  # since transformers 5.24, and before
    if known:
        return attention.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, known[0]: cache}), with_kwargs=True
        )
    raise ValueError(
        f"{type(attention).__name__} takes no cache under a known name ({', '.join(names)}); its keys and values "
        "cannot be seen or rounded: set scheme.kv_cache to null"
    )


class ScaledCodes(torch.autograd.Function):
    """W[n, k] = codes[n, k] * scale[n, k // g]; dL/dscale[n, j] = sum over the group of dL/dW * codes.

    codes: int8 (N, K / g, g), zero point already taken off. scale: (N, K / g) in the dtype of the computation.
    """

    @staticmethod
    def forward(ctx: Any, codes: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scale)
        return (codes * scale[..., None]).flatten(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        codes, scale = ctx.saved_tensors
        return None, (grad.view(codes.shape) * codes).sum(-1, dtype=torch.float32).to(scale.dtype)


class CompensatedLinear(nn.Module):
    """Takes the place of a linear in the student, which sets `scale` and `bias` before each forward pass.

    With learned scales it holds the signed `codes`, int8 (N, K / g, g); otherwise the dequantized `weight` (N, K).
    """

    def __init__(self, q: Quantized, fmt: TensorFormat, learn_scale: bool, dtype: torch.dtype) -> None:
        super().__init__()
        if learn_scale and not fmt.is_int:
            raise ValueError(f"train.learn.scale trains int4 and int8 scales; {fmt} has none: learn the bias only")
        self.codes: Tensor | None = None
        self.weight: Tensor | None = None
        if learn_scale:
            self.codes = grouped(signed_codes(q).to(torch.int8), fmt.group_of(q.codes.shape[1]))
        else:
            self.weight = dequantize(q, fmt).to(dtype)
        self.scale: Tensor | None = None
        self.bias: Tensor | None = None
        self.input_format: TensorFormat | None = None
        self.input_scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.input_format is not None:
            x = FakeQuantInput.apply(x, self.input_format, self.input_scale)
        weight: Any = self.weight if self.codes is None else ScaledCodes.apply(self.codes, self.scale)
        return F.linear(x, weight, self.bias)
