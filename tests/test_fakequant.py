"""The trainable linear: gradients against autograd and differences, the forward pass against what is exported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qat.fakequant import CompensatedLinear
from qat.parts import OnGrid, ToInteger
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


@settings(deadline=None)
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


@settings(deadline=None)
@given(values=st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=20), seed=st.integers(0, 9))
def test_integers_stay_in_their_range_and_gradients_that_lead_out_stop(values: list[float], seed: int) -> None:
    x = torch.tensor(values, requires_grad=True)
    y = ToInteger.apply(x, -3, 5)
    assert y.tolist() == [min(5, max(-3, round(v))) for v in values]
    grad = torch.randn(len(values), generator=torch.Generator().manual_seed(seed))
    y.backward(grad)
    for value, given_, got in zip(values, grad.tolist(), x.grad.tolist(), strict=True):
        stops = (value > 5 and given_ < 0) or (value < -3 and given_ > 0)  # a step goes against the gradient
        assert got == (0 if stops else given_)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
def test_the_forward_pass_uses_the_weight_that_is_exported(kind: str, dtype: torch.dtype, packed: bool) -> None:
    q, fmt = random_quantized(kind), FORMATS[kind]
    linear = CompensatedLinear(q, fmt, fmt.is_int, dtype, packed)
    scale = q.scale
    if fmt.is_int:
        linear.scale = scale = scale_to_grid(q.scale * 1.1)
        linear.refresh()
    linear.bias = torch.randn(ROWS, generator=torch.Generator().manual_seed(1)).to(dtype)
    x = torch.randn(2, 5, COLUMNS, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert torch.equal(linear.dense(), slow_weight(q, scale).to(dtype))
    assert torch.equal(linear(x), F.linear(x, slow_weight(q, scale).to(dtype), linear.bias))


LEARNED = (("bias",), ("row",), ("bias", "row"), ("scale",), ("bias", "scale"), ("scale", "zero", "codes"))


@pytest.mark.parametrize("kind", INT)
@pytest.mark.parametrize(
    ("learned", "packed"),
    [(kinds, False) for kinds in LEARNED] + [(kinds, True) for kinds in LEARNED if "codes" not in kinds],
)
def test_gradients_are_those_of_a_plain_linear(kind: str, learned: tuple[str, ...], packed: bool) -> None:
    """Autograd through (codes - zero) * scale and F.linear, in float64, twice over (micro-batches add up)."""
    q, fmt = random_quantized(kind), FORMATS[kind]
    linear = CompensatedLinear(q, fmt, True, torch.float32, packed)
    linear.anchor, linear.bias = torch.zeros((), requires_grad=True), torch.randn(ROWS, generator=torch.Generator())
    groups = q.scale.shape[1]
    shapes = {"bias": (ROWS,), "row": (ROWS,), "scale": (ROWS, groups), "zero": (ROWS, groups), "codes": q.codes.shape}
    linear.grads = {name: torch.zeros(shapes[name]) for name in learned}
    symmetric = torch.full((ROWS, groups), 0.0 if kind == "int8" else 8.0)
    zero = symmetric if q.zero is None else q.zero
    leaves = {"codes": q.codes, "zero": zero, "scale": q.scale, "bias": linear.bias, "row": torch.ones(ROWS)}
    leaves = {name: value.double().requires_grad_() for name, value in leaves.items()}
    by_group = leaves["codes"].view(ROWS, groups, -1) - leaves["zero"][..., None]
    weight = (by_group * leaves["scale"][..., None]).view(ROWS, COLUMNS) * leaves["row"][:, None]
    for seed in range(2):
        x = torch.randn(7, COLUMNS, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        other = x.detach().double().requires_grad_()
        linear(x[None]).square().sum().backward()
        F.linear(other, weight, leaves["bias"]).square().sum().backward(retain_graph=True)
        assert torch.allclose(x.grad.double(), other.grad, rtol=1e-4, atol=1e-3)
    for name in learned:
        expected = leaves[name].grad
        assert torch.allclose(linear.grads[name].double(), expected, rtol=1e-4, atol=float(expected.abs().max()) * 1e-5)
    assert linear.anchor.grad is None and (linear.weight is None if packed else linear.weight.grad is None)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("learned", [(), ("bias",), ("scale",)])
def test_a_packed_linear_keeps_codes_alone_between_passes(kind: str, learned: tuple[str, ...]) -> None:
    """Neither the module nor what a forward pass saves for backward holds a weight of 16 or 32 bits."""
    q, fmt = random_quantized(kind), FORMATS[kind]
    linear = CompensatedLinear(q, fmt, True, torch.bfloat16, packed=True)
    assert linear.packed is not None and not list(linear.parameters())
    bytes_per_code = 0.5 if q.codes.dtype == torch.uint8 else 1
    assert linear.packed.codes.nbytes == bytes_per_code * ROWS * COLUMNS
    linear.grads = {name: torch.zeros((ROWS,) if name == "bias" else q.scale.shape) for name in learned}
    saved = list[Tensor]()
    x = torch.randn(3, COLUMNS, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = linear(x)
    assert all(t.shape == x.shape for t in saved)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(y) @ linear.dense())


def test_an_input_without_gradient_still_trains_the_linear() -> None:
    q = random_quantized("group")
    linear = CompensatedLinear(q, FORMATS["group"], False, torch.float32)
    linear.anchor, linear.grads = torch.zeros((), requires_grad=True), {"bias": torch.zeros(ROWS)}
    linear(torch.ones(3, COLUMNS)).sum().backward()
    assert torch.equal(linear.grads["bias"], torch.full((ROWS,), 3.0))


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
