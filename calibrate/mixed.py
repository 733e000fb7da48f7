"""What each fused group of linears would add to the KL when it is stored in each of several formats.

Let a group's weights W become W + E, everything else staying the parent's. The KL of a window's predictions is, to
second order, 1/2 E[<E, G>^2]: G = sum over its tokens of g x^T is the gradient at W of the window's log likelihood of
tokens y drawn from the parent's own prediction (the Fisher information; Martens 2014, section 9). <E, G> goes over all
linears of the group, so their errors may add up or cancel, and so may those of different tokens. One draw for each
window: with w windows the relative standard error of a number is about sqrt(2 / w), 13% for 128.

One pass forward and one back serves all groups and formats. In memory: one block, its errors in every format in the
computing dtype, one weight gradient, and the block inputs of a wave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from calibrate.sensitivity import Watch, backward
from qat.model import Model

VERSION = 1


def products(
    model: Model,
    windows: Tensor,
    groups: Sequence[Sequence[Sequence[str]]],
    errors: Callable[[str], Tensor],
    seed: int,
    batch: int,
    budget: int,
) -> Tensor:
    """<E, G> of every window, group and format: (num_windows, num_groups, num_formats) float64.

    windows: token ids (num_windows, length). groups: for each block, its groups of linears by full name, numbered
    through the model. errors(name): E of a linear in each format, (num_formats, N, K) of any floating dtype. budget:
    bytes of block inputs kept at once.
    """
    number = {name: i for i, group in enumerate(g for block in groups for g in block) for name in group}
    found: Tensor | None = None

    def enter(index: int) -> Callable[[slice], Mapping[str, Watch]]:
        nonlocal found
        error = {name: errors(name).to(model.device, model.dtype) for group in groups[index] for name in group}
        if found is None:
            num_formats = len(next(iter(error.values())))
            found = torch.zeros(len(windows), max(number.values()) + 1, num_formats, dtype=torch.float64)
        into = found
        return lambda rows: {name: partial(_add, into[rows, number[name]], error[name]) for name in error}

    # an expert sees the tokens of a batch without order; those of a single window all belong together
    backward(model, windows, enter, seed, 1 if model.arch.experts else batch, budget)
    assert found is not None, "no linear to measure"
    return found


def _add(into: Tensor, error: Tensor, x: Tensor, grad: Tensor) -> None:
    """into (windows, formats) += <E, g^T x>. x: (windows, length, K), or (tokens, K) of one window; grad likewise."""
    x, grad = (part if part.ndim == 3 else part[None] for part in (x, grad))
    for row in range(len(x)):
        gradient = grad[row].T @ x[row]
        into[row] += (error.flatten(1) @ gradient.flatten()).double().cpu()


def kl(products: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Nats per token (num_groups, num_formats) float64 that each group adds in each format, and its standard error.

    length: tokens in a window. Groups are taken as independent when these are summed.
    """
    each = products.square() / (2 * length)
    return each.mean(0), each.std(0) / len(each) ** 0.5
