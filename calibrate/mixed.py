"""What each fused group of linears would add to the KL when it is stored in each of several formats.

Let a group's weights W become W + E, everything else staying the parent's. The KL of a window's predictions is, to
second order, 1/2 E[<E, G>^2]: G = sum over its tokens of g x^T is the gradient at W of the window's log likelihood of
tokens y drawn from the parent's own prediction (the Fisher information; Martens 2014, section 9). <E, G> goes over all
linears of the group, so that their errors may add up or cancel, and so may those of different tokens.

With one draw a window, a mean over w windows has a relative standard error of sqrt(2 / w), 18% for 64: more than
formats of equal dtype differ by. The diagonal, 1/2 E[sum E_ij^2 G_ij^2], is what independent errors of the weights come
to, and has a third of that noise or less. So that is taken, times the group's ratio of the first to it (errors that a
method made to cancel have a small one), and the ratios of groups are drawn to their mean as far as they differ by no
more than their noise (a random-effects estimate; DerSimonian and Laird 1986).

One pass forward and one back serves all groups and formats. In memory: one block, its errors in every format in
bfloat16, one weight gradient, and the block inputs of a wave. An expert that no token was sent to adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from calibrate.sensitivity import Watch, backward, chance
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
) -> tuple[Tensor, Tensor]:
    """<E, G> of every window, group and format, and <E^2, G^2>: both (num_windows, num_groups, num_formats) float64.

    windows: token ids (num_windows, length). groups: for each block, its groups of linears by full name, numbered
    through the model. errors(name): E of a linear in each format, (num_formats, N, K) of any floating dtype. budget:
    bytes of block inputs kept at once.
    """
    number = {name: i for i, group in enumerate(g for block in groups for g in block) for name in group}
    found: tuple[Tensor, Tensor] | None = None

    def enter(index: int) -> Callable[[slice], Mapping[str, Watch]]:
        nonlocal found
        error = {name: errors(name).to(model.device, torch.bfloat16) for group in groups[index] for name in group}
        if found is None:
            shape = len(windows), max(number.values()) + 1, len(next(iter(error.values())))
            found = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
        plain, squares = found
        return lambda rows: {
            name: partial(_add, plain[rows, number[name]], squares[rows, number[name]], error[name]) for name in error
        }

    # an expert sees the tokens of a batch without order; those of a single window all belong together
    backward(
        model, windows, enter, chance(len(windows), windows.shape[1], seed), 1 if model.arch.experts else batch, budget
    )
    assert found is not None, "no linear to measure"
    return found


def _add(plain: Tensor, squares: Tensor, error: Tensor, x: Tensor, grad: Tensor) -> None:
    """plain, squares: (windows, formats). x: (windows, length, K), or (tokens, K) of one window; grad likewise."""
    x, grad = (part.float() if part.ndim == 3 else part[None].float() for part in (x, grad))
    for row in range(len(x)):
        gradient = (grad[row].T @ x[row]).flatten()
        plain[row] += torch.stack([one.flatten().float() @ gradient for one in error]).double().cpu()
        gradient.square_()
        squares[row] += torch.stack([one.flatten().float().square_() @ gradient for one in error]).double().cpu()


def kl(plain: Tensor, squares: Tensor, length: int) -> Tensor:
    """Nats per token that each group adds in each format, (num_groups, num_formats) float64, from `products`.

    length: tokens in a window. A group whose weights all stay the same, or never reach the output, adds 0.
    """
    diagonal = squares.mean(0)
    counts = diagonal > 0
    ratios = (plain.square() / torch.where(counts, diagonal, 1)).sum(-1) / counts.sum(-1).clamp_min(1)
    alive, ratio = counts.any(-1), ratios.mean(0)  # ratios: (windows, groups)
    if alive.sum() > 1 and len(plain) > 1:
        noise = (ratios.var(0) / len(ratios))[alive].mean()
        between = (ratio[alive].var() - noise).clamp_min(0)
        mean, own = ratio[alive].mean(), between / (between + noise) if noise else 1.0
        ratio = mean + own * (ratio - mean)
    return ratio[:, None] * diagonal / (2 * length)
