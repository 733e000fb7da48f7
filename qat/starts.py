"""Where learning starts, measured on a few windows of the training text; see the files of qat/learn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from qat.fakequant import CompensatedLinear
from qat.quant import signed_codes
from qat.shard import whole
from qat.student import Student

Watch = Callable[[str, Tensor, Tensor], None]  # (linear, its input, its output)


@torch.no_grad()
def output_units(student: Student, windows: Tensor) -> Tensor:
    """Flat, for the part `bias`: per linear, the mean over channels of the root mean square output.

    The first token of a window, an attention sink, is left out. An expert that no token came to takes the mean unit.
    """
    names = student.parts["bias"].shapes
    squares: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def watch(name: str, x: Tensor, y: Tensor) -> None:
        rows = _without_first(y, 1)
        squares[name] = squares.get(name, 0) + rows.float().square().sum(0)
        counts[name] = counts.get(name, 0) + len(rows)

    with student.ends():
        states = [student.embed(ids) for ids in windows.split(1)]
        for index in range(len(student.blocks)):
            with _watched(student, index, list(names), watch):
                states = [student.run_block(index, state) for state in states]
    units = {name: (squares[name] / count).sqrt().mean() for name, count in counts.items() if count}
    usual = torch.stack(list(units.values())).mean()
    return torch.cat([units.get(name, usual).expand(rows) for name, (rows, _) in names.items()])


@torch.no_grad()
def correct_means(student: Student, windows: Tensor, skip_tokens: int) -> None:
    """Let every learned bias start at what takes away its linear's mean error, given the corrected blocks before it.

    The error is that of the weights, (W - W_q) E[x], with x from the student and W as a transform left it. skip_tokens:
    fewer than a window has.
    """
    part, parents = student.parts["bias"], student.teacher.tensors
    views = part.views(part.start, by_row=True)
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def watch(name: str, x: Tensor, y: Tensor) -> None:
        rows = _without_first(x, skip_tokens)
        sums[name] = sums.get(name, 0) + rows.float().sum(0)
        counts[name] = counts.get(name, 0) + len(rows)

    known = set(parents.names())
    with student.ends():
        states = [student.embed(ids) for ids in windows.split(1)]
        for index in range(len(student.blocks)):
            sums.clear()
            counts.clear()
            with _watched(student, index, list(views), watch):
                outputs = [student.run_block(index, state) for state in states]
            for name, count in counts.items():
                mean = sums[name] / max(1, count)  # an expert that no token came to has no error to take away
                rows, columns = (factor.to(mean.device) for factor in student.artifact.factors(name))
                goal = parents.get(f"{name}.weight").to(mean.device).float() @ (mean * columns[0])
                if f"{name}.bias" in known:
                    goal += parents.get(f"{name}.bias").to(mean.device).float()
                goal *= rows[:, 0]
                views[name].copy_(goal - whole(student.linears[name].dense()).float() @ mean)
            if counts:
                student.refresh()
                outputs = [student.run_block(index, state) for state in states]
            states = outputs


def _without_first(x: Tensor, tokens: int) -> Tensor:
    """Rows (tokens, features) of (batch, length, features), without the first of each window; experts' as they are."""
    return x if x.dim() == 2 else x[:, tokens:].flatten(0, 1)


def norm_factors(student: Student) -> Tensor:
    """Flat, for the part `norm`: what each norm multiplies with, its weight or, in Gemma's, 1 + its weight."""
    return student.parts["norm"].start + student.arch.norm_offset


def residuals(student: Student) -> Tensor:
    """Flat, for the part `codes`: how far, in codes within +-0.49, the weight that was rounded lies from its code."""
    out = []
    for name in student.parts["codes"].shapes:
        q = student.artifact.quantized(name)
        rows, columns = student.artifact.factors(name)
        weight = (student.teacher.tensors.get(f"{name}.weight").float() * columns * rows).view(*q.scale.shape, -1)
        off = weight / q.scale[..., None] - signed_codes(q).view(weight.shape)
        out.append(off.clamp(-0.49, 0.49).flatten().to(student.device))
    return torch.cat(out)


@contextmanager
def _watched(student: Student, index: int, names: Sequence[str], watch: Watch) -> Iterator[None]:
    """Call `watch` for every forward pass of the linears of one block that are in `names`."""

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        return lambda module, args, output: watch(name, args[0], output)

    here: list[tuple[str, CompensatedLinear]] = [
        (name, student.linears[name]) for name in names if student.arch.split(name)[0] == index
    ]
    handles = [linear.register_forward_hook(hook(name)) for name, linear in here]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
