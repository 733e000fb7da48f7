"""How much the model's output distribution depends on each token of each linear's output.

The KL between the teacher and a student whose linear outputs differ by a small d is, to second order, 1/2 E[(g . d)^2]:
g is the gradient at that output of log p(y), y drawn from the teacher's own prediction (the Fisher information; Martens
2014, section 9). Here only |g|^2 of each token is kept: a token whose error never reaches the logits counts little,
such as the huge but inert first token of a window. `calibrate.range.kl` weights each layer's inputs by it.

One forward pass that keeps each block's input, then a backward pass from the last block to the first that recomputes
each; one block in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from qat import report
from qat.model import Model

LOGIT_BYTES = 256 * 2**20  # float32 logits alive at once
Watch = Callable[[Tensor, Tensor], None]  # a linear's input (..., K) and the gradient at its output (..., N)


def chance(num_windows: int, length: int, seed: int) -> Tensor:
    """What decides the token that is drawn at each place: (num_windows, length) float32 in [0, 1).

    Of all windows, so that a rank takes its rows and draws what one process would.
    """
    return torch.rand(num_windows, length, generator=torch.Generator().manual_seed(seed))


def token_weights(
    model: Model,
    windows: Tensor,
    groups: Sequence[Sequence[Sequence[str]]],
    drawn: Tensor,
    batch: int,
    budget: int,
) -> dict[str, Tensor]:
    """|g|^2 of each token, summed over the linears of a group: (num_windows, length) float32 by the group's first name.

    windows: token ids (num_windows, length). groups: for each block, groups of linears (full names) that share an
    input. drawn: of `chance`, for these windows. budget: bytes of block inputs kept at once; windows go through in
    waves of that size.
    """
    found = {group[0]: torch.zeros(windows.shape) for block in groups for group in block}

    def enter(index: int) -> Callable[[slice], Mapping[str, Watch]]:
        return lambda rows: {
            name: partial(_add_squares, found[group[0]][rows]) for group in groups[index] for name in group
        }

    backward(model, windows, enter, drawn, batch, budget)
    return found


def means(weights: Mapping[str, Tensor], device: torch.device) -> dict[str, float]:
    """The mean of each group's token weights over the tokens of all ranks, at least the smallest float32."""
    sums = torch.stack([rows.sum(dtype=torch.float64) for rows in weights.values()]).to(device)
    count = torch.tensor([float(next(iter(weights.values())).numel())], dtype=torch.float64, device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(sums)
        dist.all_reduce(count)
    floor = torch.finfo(torch.float32).tiny
    return dict(zip(weights, (sums / count).clamp_min(floor).tolist(), strict=True))


def _add_squares(into: Tensor, x: Tensor, grad: Tensor) -> None:
    into += grad.float().square().sum(-1).cpu()


def backward(
    model: Model,
    windows: Tensor,
    enter: Callable[[int], Callable[[slice], Mapping[str, Watch]]],
    drawn: Tensor,
    batch: int,
    budget: int,
) -> None:
    """Run windows (num_windows, length) forward and back; show inputs and g of the linears that are asked for.

    enter(index): called in each wave when a block is in memory on the way back; what it returns gives, for the windows
    `rows` of a batch, the watchers of linears by full name. The rest as in `token_weights`.
    """
    one = windows.shape[1] * model.config.hidden_size * model.dtype.itemsize * len(model.blocks)
    wave = max(1, budget // one)
    starts = range(0, len(windows), wave)
    with report.Steps("sensitivity", total=2 * len(starts) * len(model.blocks), unit="block") as steps:
        for start in starts:
            stop = min(start + wave, len(windows))
            parts = [slice(first, min(first + batch, stop)) for first in range(start, stop, batch)]
            _wave(model, windows, parts, enter, drawn, steps.advance)


def _wave(
    model: Model,
    windows: Tensor,
    parts: list[slice],
    enter: Callable[[int], Callable[[slice], Mapping[str, Watch]]],
    drawn: Tensor,
    block_done: Callable[[], None],
) -> None:
    inputs: list[list[Tensor]] = []  # of each block, of each batch, on the CPU
    with model.ends(), torch.no_grad():
        states = [model.embed(windows[rows]).cpu() for rows in parts]
    for index in range(len(model.blocks)):
        inputs.append(states)
        with model.block(index), torch.no_grad():
            states = [model.run_block(index, state.to(model.device)).cpu() for state in states]
        block_done()
    with model.ends():
        grads = [
            _sampled_gradient(model, state.to(model.device), drawn[rows].flatten()).cpu()
            for rows, state in zip(parts, states, strict=True)
        ]
    for index in reversed(range(len(model.blocks))):
        with model.block(index):
            watchers = enter(index)
            for number, state in enumerate(inputs.pop()):
                handles = [
                    model.root.get_submodule(name).register_forward_hook(_hook(watch))
                    for name, watch in watchers(parts[number]).items()
                ]
                leaf = state.to(model.device).requires_grad_(True)
                model.run_block(index, leaf).backward(grads[number].to(model.device))
                assert leaf.grad is not None
                grads[number] = leaf.grad.cpu()
                for handle in handles:
                    handle.remove()
        block_done()


def _hook(watch: Watch) -> Callable[..., None]:
    def forward(module: torch.nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        x = args[0].detach()
        out.register_hook(lambda grad: watch(x, grad))

    return forward


def _sampled_gradient(model: Model, hidden: Tensor, drawn: Tensor) -> Tensor:
    """The gradient at the last block's output (batch, length, hidden) of the sum of log p(y), y drawn from p."""
    leaf = hidden.flatten(0, 1).requires_grad_(True)
    chunk = max(16, LOGIT_BYTES // (4 * model.config.vocab_size))
    for part, share in zip(leaf.split(chunk), drawn.to(leaf.device)[:, None].split(chunk), strict=True):
        logp = F.log_softmax(model.logits(part), -1)
        cumulative = logp.detach().exp().cumsum(-1)
        token = torch.searchsorted(cumulative, share * cumulative[:, -1:]).clamp_max(logp.shape[-1] - 1)
        logp.gather(1, token).sum().backward()
    assert leaf.grad is not None
    return leaf.grad.view(hidden.shape)
