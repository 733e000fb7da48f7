"""A linear whose codes are frozen and whose bias, scales... are learned: y = x W^T + bias.

The weight is dequantized once, or once per step when something in it is learned; one that is kept packed, in every
pass. Backward is written out: small gradients are added in float32 to the views in `grads`, and a gradient of the
weight (a product as large as the forward pass) is formed only for what needs one.

    learned          added to grads, G = dL/dy (tokens, N)                                 weight gradient
    bias             sum_t G[t, n]                                                         no
    scale, per row   sum_t G[t, n] (y[t, n] - bias[n]), which is sum_j dL/dS[n, j] S[n, j]  no
    scale            sum over the group of D * W / S, where D = G^T x                       yes
    zero             -S times the sum over the group of D                                   yes
    codes            D * S                                                                  yes
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from qat.packed import PackedWeight
from qat.quant import Quantized, dequantize, fake_quant_cache, fake_quant_input, signed_codes
from qat.scheme import TensorFormat

ROW, WEIGHT = "row", ("scale", "zero", "codes")


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

    A cache that the caller hands over, to decode token by token, stores what `cache` gives.

    Raises ValueError when the module takes no cache under a known name: another would be ignored there.
    """
    names = inspect.signature(attention.forward).parameters
    known = [name for name in ("cache", "past_key_values") if name in names]  # since transformers 5.24, and before
    if known:
        return attention.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {**kwargs, known[0]: _Before(cache, kwargs.get(known[0]))}),
            with_kwargs=True,
        )
    raise ValueError(
        f"{type(attention).__name__} takes no cache under a known name ({', '.join(names)}); its keys and values "
        "cannot be seen or rounded: set scheme.kv_cache to null"
    )


class _Before:
    """A cache in front of the caller's, if there is one."""

    def __init__(self, cache: Any, behind: Any) -> None:
        self.cache, self.behind = cache, behind

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = self.cache.update(keys, values, *args, **kwargs)
        return (keys, values) if self.behind is None else self.behind.update(keys, values, *args, **kwargs)


def anchor(like: Tensor) -> Tensor:
    """An empty tensor that needs a gradient and gets none, so that backward runs where no other input needs one.

    Made anew in every forward pass: a leaf that is kept belongs to the stream it was first used on, for which a CUDA
    graph that is being captured cannot wait.
    """
    return like.new_empty(0, requires_grad=True)


class _Into(torch.autograd.Function):
    """The weight; its gradient is added to `grad`."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
        ctx.grad = grad
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.grad.add_(grad)
        return None, None, None


class GradientInto(nn.Module):
    """Parametrization of a weight as itself, whose gradient is added to `grad` instead of its own."""

    def __init__(self, grad: Tensor) -> None:
        super().__init__()
        self.into = grad

    def forward(self, weight: Tensor) -> Tensor:
        return _Into.apply(anchor(weight), weight, self.into)


class _Linear(torch.autograd.Function):
    """Adds to the gradients that `linear.grads` names; x gets its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, linear: CompensatedLinear) -> Tensor:
        weight = linear.dense()
        y = F.linear(x, weight, linear.bias)
        learned = linear.grads
        ctx.linear = linear
        kept = weight if linear.packed is None else None  # a packed one is dequantized again
        ctx.save_for_backward(kept, x if any(k in learned for k in WEIGHT) else None, y if ROW in learned else None)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        weight, x, y = ctx.saved_tensors
        linear: CompensatedLinear = ctx.linear
        weight = linear.dense() if weight is None else weight
        flat = grad.flatten(0, -2)  # (tokens, N)
        learned = linear.grads
        if "bias" in learned:
            learned["bias"].add_(flat.sum(0, dtype=learned["bias"].dtype))
        if ROW in learned:
            total = (flat * y.flatten(0, -2)).sum(0, dtype=learned[ROW].dtype)
            if linear.bias is not None:
                total -= linear.bias * flat.sum(0, dtype=total.dtype)
            learned[ROW].add_(total)
        if x is not None:
            linear.add_weight_grads(flat.t() @ x.flatten(0, -2), weight)
        return (grad @ weight if ctx.needs_input_grad[0] else None), None, None


class CompensatedLinear(nn.Module):
    """Takes the place of a linear in the student.

    weight: (N, K), frozen, in the dtype of the computation; None when it is `packed`. bias: (N,) or None. signed: codes
    less zero points, int8 (N, K / g, g), when the weight is remade by `refresh`, else None. scale: float32 (N, K / g),
    of a weight that is remade or packed. grads: where backward adds, float32: bias (N,), row (N,), scale and zero
    (N, K / g), codes (N, K), the last two not of a packed weight.
    """

    weight: Tensor

    def __init__(self, q: Quantized, fmt: TensorFormat, remade: bool, dtype: torch.dtype, packed: bool = False) -> None:
        super().__init__()
        self.dtype = dtype
        self.packed = PackedWeight(q, fmt) if packed else None
        dense = None if packed else nn.Parameter(dequantize(q, fmt).to(dtype), requires_grad=False)
        self.register_parameter("weight", dense)
        self.signed: Tensor | None = None
        if remade and not packed:
            self.signed = signed_codes(q).to(torch.int8).view(*q.scale.shape, -1)
        self.scale = q.scale if remade or packed else None
        self.rows = slice(None)
        self.bias: Tensor | None = None
        self.grads: dict[str, Tensor] = {}
        self.input_format: TensorFormat | None = None
        self.input_scale: Tensor | None = None

    def dense(self) -> Tensor:
        """The weight (N, K) with the current scale."""
        if self.packed is None:
            return self.weight
        assert self.scale is not None
        return self.packed.dequantize(self.scale, self.dtype)

    def refresh(self, signed: Tensor | None = None) -> None:
        """Dequantize again, in place, with the current `scale`. signed: codes less zero points where they changed."""
        if self.packed is not None:
            return
        signed = self.signed if signed is None else signed
        assert signed is not None and self.scale is not None
        with torch.no_grad():
            weight = self.weight.data
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            torch.mul(signed, self.scale[self.rows, :, None], out=local.view(signed.shape))

    def keep_rows(self, rows: slice) -> None:
        """The weight was split over ranks and this one holds `rows`: of the codes no other are needed."""
        self.rows = rows
        if self.signed is not None:
            self.signed = self.signed[rows].clone()

    def add_weight_grads(self, weight_grad: Tensor, weight: Tensor) -> None:
        """Reduce dL/dW (N, K) to the gradients of what is learned in the weight (N, K)."""
        assert self.scale is not None
        by_group = weight_grad.view(*self.scale.shape, -1)
        learned = self.grads
        if "scale" in learned:  # the codes are W / S, so they need not be at hand
            total = (by_group * weight.view(by_group.shape)).sum(-1, dtype=learned["scale"].dtype)
            learned["scale"].add_(total.div_(self.scale))
        if "zero" in learned:
            learned["zero"].sub_(by_group.sum(-1, dtype=learned["zero"].dtype).mul_(self.scale))
        if "codes" in learned:
            learned["codes"].add_((by_group * self.scale[..., None]).view(weight_grad.shape))

    def forward(self, x: Tensor) -> Tensor:
        if self.input_format is not None:
            x = FakeQuantInput.apply(x, self.input_format, self.input_scale)
        if not torch.is_grad_enabled() or not (self.grads or self.packed):
            return F.linear(x, self.dense(), self.bias)
        return _Linear.apply(x, anchor(x), self)
