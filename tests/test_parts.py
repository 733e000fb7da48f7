"""Flat vectors of learned tensors: their order, views and values against one tensor at a time."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qat import plugins
from qat.parts import Part
from qat.quant import MIN_SCALE

GAIN, SCALE = (plugins.find("qat.learn", kind) for kind in ("gain", "scale"))
SHAPES = st.dictionaries(
    st.text("abc", min_size=1, max_size=3), st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1
)


@settings(deadline=None)
@given(shapes=SHAPES, seed=st.integers(0, 99))
def test_values_are_those_of_each_tensor_and_the_order_is_not_that_of_arrival(
    shapes: dict[str, tuple[int, int]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.rand(shape, generator=generator) + 0.1 for name, shape in shapes.items()}
    part = Part("scale", tensors, {"gain": GAIN, "scale": SCALE})
    shuffled = list(tensors)
    random.Random(seed).shuffle(shuffled)
    other = Part("scale", {name: tensors[name] for name in shuffled}, {"scale": SCALE, "gain": GAIN})
    assert list(part.shapes) == list(other.shapes) and torch.equal(part.start, other.start)
    deltas = {kind: torch.randn(part.size_of(kind), generator=generator) * 0.1 for kind in ("gain", "scale")}
    gains, scales = part.views(deltas["gain"], by_row=True), part.views(deltas["scale"], by_row=False)
    for name, value in part.views(part.value(deltas), by_row=False).items():
        expected = tensors[name] * (1 + gains[name][:, None]) * (1 + scales[name])
        assert value.shape == tensors[name].shape and torch.allclose(value, expected, rtol=2**-8)


@settings(deadline=None)
@given(shapes=SHAPES, seed=st.integers(0, 99))
def test_row_sums_are_spread_to_the_same_gradient_of_a_factor(shapes: dict[str, tuple[int, int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.rand(shape, generator=generator) + 0.1 for name, shape in shapes.items()}
    part = Part("scale", tensors, {"gain": GAIN})
    delta = (torch.randn(part.num_rows, generator=generator) * 0.1).requires_grad_()
    value = part.value({"gain": delta})
    part.current.copy_(value.detach())
    by_value = torch.randn(len(part.start), generator=generator)
    (expected,) = torch.autograd.grad(value, delta, by_value, retain_graph=True)
    for name, rows in part.views(part.grad, by_row=True).items():
        slope, scale = (part.views(flat, by_row=False)[name] for flat in (by_value, part.current))
        rows.copy_((slope * scale).sum(1))
    value.backward(part.value_grad())
    assert torch.allclose(delta.grad, expected, rtol=2**-7, atol=1e-2 * float(by_value.abs().max()))


def test_a_scale_below_its_floor_can_come_back() -> None:
    """The floor is what is stored; a factor that has gone below still hears what would raise it, and nothing else."""
    scales = torch.tensor([[MIN_SCALE, 0.5, MIN_SCALE, MIN_SCALE]])
    part = Part("scale", {"a": scales}, {"scale": SCALE})
    delta = torch.tensor([-0.5, -0.5, -0.5, 0.5], requires_grad=True)
    value = part.value({"scale": delta})
    assert value.tolist() == [MIN_SCALE, 0.25, MIN_SCALE, 1.5 * MIN_SCALE]
    (grad,) = torch.autograd.grad(value, delta, torch.tensor([-1.0, -1.0, 1.0, 1.0]))
    assert grad.tolist() == [-MIN_SCALE, -0.5, 0.0, MIN_SCALE]
