"""The trainable linear: gradients against autograd and differences, the forward pass against what is exported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qat.fakequant import CompensatedLinear, OnGrid, ScaledCodes
from qat.quant import Quantized, scale_to_grid
from qat.scheme import TensorFormat

FORMATS = {
    "group": TensorFormat(group_size=8),
    "channel": TensorFormat(),
    "asymmetric": TensorFormat(group_size=8, symmetric=False),
    "int8": TensorFormat(dtype="int8", group_size=8),
    "fp8-channel": TensorFormat(dtype="fp8_e4m3"),
    "fp8-block": TensorFormat(dtype="fp8_e4m3", per="block"),
    "fp8-tensor": TensorFormat(dtype="fp8_e4m3", per="tensor"),
}
INT = ("group", "channel", "asymmetric", "int8")
ROWS, COLUMNS = 6, 32


def random_quantized(kind: str, seed: int = 0) -> Quantized:
    random, fmt = torch.Generator().manual_seed(seed), FORMATS[kind]
    if not fmt.is_int:
        codes = (torch.randn(ROWS, COLUMNS, generator=random) * 100).to(torch.float8_e4m3fn)
        return Quantized(codes, torch.rand(fmt.scale_shape(ROWS, COLUMNS), generator=random) + 0.1)
    groups = COLUMNS // fmt.group_of(COLUMNS)
    codes = torch.randint(0, 16, (ROWS, COLUMNS), generator=random, dtype=torch.uint8)
    zero = torch.randint(0, 16, (ROWS, groups), generator=random, dtype=torch.uint8)
    scale = scale_to_grid(torch.rand(ROWS, groups, generator=random))
    if fmt.bits == 8:
        return Quantized(torch.randint(-128, 128, (ROWS, COLUMNS), generator=random, dtype=torch.int8), scale)
    return Quantized(codes, scale, None if fmt.symmetric else zero)


def slow_weight(q: Quantized, scale: Tensor) -> Tensor:
    """Codes times scales, one value at a time."""
    out = torch.zeros(q.codes.shape)
    for n in range(ROWS):
        for k in range(COLUMNS):
            row, group = min(n, len(scale) - 1), k // (COLUMNS // scale.shape[1])
            zero = 0.0 if q.codes.dtype != torch.uint8 else 8.0 if q.zero is None else q.zero[row, group].item()
            out[n, k] = (q.codes[n, k].float() - zero) * scale[row, group]
    return out


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 5), groups=st.integers(1, 4), size=st.integers(1, 9), seed=st.integers(0, 99))
def test_the_scale_gradient_is_autograds(rows: int, groups: int, size: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(-15, 16, (rows, groups, size), generator=random, dtype=torch.int8)
    ours = torch.rand(rows, groups, generator=random).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    weights = torch.randn(rows, groups * size, generator=random)
    plain = (codes.float() * theirs[..., None]).reshape(rows, groups * size)
    made = ScaledCodes.apply(codes, ours)
    assert torch.equal(made, plain)
    ((made - weights) ** 2).sum().backward()
    ((plain - weights) ** 2).sum().backward()
    assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-4)


def test_the_scale_gradient_is_the_slope_of_the_loss() -> None:
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (3, 2, 4), generator=random, dtype=torch.int8)
    scale = torch.rand(3, 2, generator=random, dtype=torch.float64)
    x, target = torch.randn(5, 8, generator=random).double(), torch.randn(5, 3, generator=random).double()

    def loss(scale: Tensor) -> Tensor:
        return (F.linear(x, ScaledCodes.apply(codes, scale)) - target).square().sum()

    leaf, step = scale.clone().requires_grad_(), 1e-4
    loss(leaf).backward()
    for n in range(3):
        for j in range(2):
            up, down = scale.clone(), scale.clone()
            up[n, j] += step
            down[n, j] -= step
            slope = (loss(up) - loss(down)) / (2 * step)
            assert torch.isclose(leaf.grad[n, j], slope, rtol=1e-5), (n, j)


@given(st.lists(st.floats(-60000, 60000, width=32), min_size=1, max_size=20))
def test_values_go_to_the_grid_and_gradients_straight_through(values: list[float]) -> None:
    x = torch.tensor(values, requires_grad=True)
    y = OnGrid.apply(x)
    assert torch.equal(y.bfloat16().float(), y) and torch.equal(y.half().float(), y)
    # bfloat16 keeps 8 significant bits; float16 is finer, except for its subnormal numbers
    assert ((y - x).abs() <= x.abs() * 2**-8 + 2**-25).all()
    grad = torch.arange(1.0, len(values) + 1)
    y.backward(grad)
    assert torch.equal(x.grad, grad)


def test_a_value_past_float16_becomes_infinite_and_not_wrong() -> None:
    assert torch.isinf(OnGrid.apply(torch.tensor([1e5, -1e5]))).all()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("learn_scale", [False, True])
def test_the_forward_pass_uses_the_weight_that_is_exported(kind: str, learn_scale: bool) -> None:
    q, fmt = random_quantized(kind), FORMATS[kind]
    if learn_scale and not fmt.is_int:
        with pytest.raises(ValueError, match=r"train\.learn\.scale trains int4 and int8.*learn the bias only"):
            CompensatedLinear(q, fmt, True, torch.float32)
        return
    linear = CompensatedLinear(q, fmt, learn_scale, torch.float32)
    scale = scale_to_grid(q.scale * 1.1) if learn_scale else q.scale
    linear.scale = scale
    linear.bias = torch.randn(ROWS, generator=torch.Generator().manual_seed(1))
    x = torch.randn(2, 5, COLUMNS, generator=torch.Generator().manual_seed(2))
    assert torch.equal(linear(x), F.linear(x, slow_weight(q, scale), linear.bias))


@pytest.mark.parametrize("kind", INT)
def test_bias_and_scale_get_the_gradients_of_a_plain_linear(kind: str) -> None:
    q, fmt = random_quantized(kind), FORMATS[kind]
    linear = CompensatedLinear(q, fmt, True, torch.float32)
    linear.scale, linear.bias = q.scale.clone().requires_grad_(), torch.zeros(ROWS, requires_grad=True)
    x = torch.randn(7, COLUMNS, generator=torch.Generator().manual_seed(2)).requires_grad_()
    linear(x).square().sum().backward()
    weight = slow_weight(q, q.scale).requires_grad_()
    other, bias = x.detach().clone().requires_grad_(), torch.zeros(ROWS, requires_grad=True)
    F.linear(other, weight, bias).square().sum().backward()
    signed = slow_weight(q, torch.ones_like(q.scale))
    expected = (weight.grad * signed).view(*q.scale.shape, -1).sum(-1)
    assert torch.allclose(linear.scale.grad, expected, rtol=1e-4, atol=1e-2)
    assert torch.allclose(linear.bias.grad, bias.grad) and torch.allclose(x.grad, other.grad)


@pytest.mark.parametrize("static", [None, 0.02])
def test_fp8_inputs_are_rounded_token_by_token(static: float | None) -> None:
    q = random_quantized("fp8-channel")
    linear = CompensatedLinear(q, FORMATS["fp8-channel"], False, torch.float32)
    per = "token" if static is None else "tensor"
    linear.input_format = TensorFormat(dtype="fp8_e4m3", per=per, dynamic=static is None)
    linear.input_scale = None if static is None else torch.tensor([[static]])
    x = torch.randn(4, COLUMNS, generator=torch.Generator().manual_seed(2)) * 5
    x[0] *= 1000  # past the static range
    tokens = []
    for token in x:
        scale = torch.tensor(max(abs(v) for v in token.tolist()) / 448) if static is None else torch.tensor(static)
        tokens.append((token / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale)
    leaf: Any = x.clone().requires_grad_()
    out = linear(leaf)
    assert torch.allclose(out, F.linear(torch.stack(tokens), slow_weight(q, q.scale)), rtol=1e-5)
    out.sum().backward()  # the rounding does not stop the gradient, nor does the clamp
    assert torch.allclose(leaf.grad, slow_weight(q, q.scale).sum(0).expand_as(x), rtol=1e-4, atol=1e-3)
