"""The pieces of learned rounding: gradients against the written-out formula, steps, draws of windows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from calibrate.round._learned_loss import Windows
from calibrate.round._learned_weights import Learned
from qat.quant import to_grid
from tests.test_learned import FORMATS, task_of


class Straight(torch.autograd.Function):
    """Any value in the forward pass, the gradient unchanged: the straight-through estimator as it is defined."""

    @staticmethod
    def forward(ctx: object, x: Tensor, value: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@pytest.mark.parametrize("symmetric", [True, False])
def test_gradients_are_those_of_the_formula(symmetric: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (40, 8)
    weight = torch.randn(shape, generator=generator)
    start = to_grid(weight.abs().amax(-1, keepdim=True) / 12)  # clips some
    zero = torch.full((40, 1), 8.0) if symmetric else torch.randint(0, 16, (40, 1), generator=generator).float()
    part = Learned(weight, start, -zero, 15 - zero, torch.zeros(shape), torch.randn(shape, generator=generator))
    part.offset.copy_(torch.rand(shape, generator=generator) - 0.5)
    part.stretch.copy_(0.8 + 0.4 * torch.rand(start.shape, generator=generator))
    found = part.gradients(slice(None))

    offset, stretch = (x.double().requires_grad_(True) for x in (part.offset, part.stretch))
    exact = start.double() * stretch
    scale = Straight.apply(exact, to_grid(exact.detach().float()).double())
    sum_ = weight.double() / scale + offset
    steps = Straight.apply(sum_, sum_.detach().round()).clamp(-zero.double(), 15 - zero.double())
    value = steps * scale
    value.backward(part.grad.double())
    clipped = (sum_.detach().round() != steps.detach()).double().mean()
    assert 0.02 < clipped < 0.9
    torch.testing.assert_close(found[0].double(), offset.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[1].double(), stretch.grad, rtol=1e-4, atol=1e-4)
    part.write()
    assert torch.equal(part.rounded.double(), value.detach().float().double())
    assert not part.grad.any()


def test_steps_are_those_of_torch_adam() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, start = torch.randn(30, 8, generator=generator), torch.full((30, 1), 0.25)
    low = torch.full((30, 1), -8.0)
    part = Learned(weight, start, low, low + 15, torch.zeros(30, 8), torch.zeros(30, 8))
    offset, stretch = (nn.Parameter(x.clone()) for x in (part.offset, part.stretch))
    adam = torch.optim.Adam(
        [{"params": [offset], "lr": 0.01}, {"params": [stretch], "lr": 0.02}], betas=(0.9, 0.999), eps=1e-12
    )
    for number in range(1, 6):
        part.grad.copy_(torch.randn(30, 8, generator=generator))
        offset.grad, stretch.grad = part.gradients(slice(None))
        adam.step()
        part.step(number, 0.01, 0.02, 0.5, (0.5, 1.5))
        torch.testing.assert_close(part.offset, offset.data, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(part.stretch, stretch.data, rtol=1e-4, atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 2**31))
def test_every_window_is_drawn_equally_often(steps: int, batch: int, seed: int) -> None:
    windows = Windows(task_of(FORMATS[0]))
    drawn = list(windows.draw(steps, batch, seed))
    assert [len(chosen) for chosen in drawn] == [batch] * steps
    counts = torch.bincount(torch.tensor([i for chosen in drawn for i in chosen]), minlength=12)
    assert counts.max() - counts.min() <= 1
