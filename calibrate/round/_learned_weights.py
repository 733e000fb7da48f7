"""The rounded weights of one block as a function of what is learned: offsets of weights, stretches of scales.

    scale = grid(start * stretch)
    steps = clamp(round(W / scale + offset), low, high)        low = -zero, high = 2^bits - 1 - zero
    W_q   = steps * scale

Gradients pass straight through the roundings (Bengio, Leonard and Courville 2013): with `inside` where the clamp did
nothing,

    dW_q / d offset  = scale * inside
    dW_q / d scale   = steps - inside * W / scale              (Esser et al. 2020, equation 3)

All weights of a block with equally long groups lie in one matrix, a group a row, so that a step costs a few kernels
whatever the number of linears. They are worked on some rows at a time: nothing of a weight's size is kept but the
weight, its offset, two moments of its gradient and, in the dtype of the computation, the rounded weight and its
gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from calibrate.rows import CHUNK
from calibrate.task import BlockTask
from qat.quant import MIN_SCALE, Quantized, on_grid, quantize

TEMPORARIES = 4  # of a chunk's size that a step holds at once
BETAS, EPSILON = (0.9, 0.999), 1e-12  # of Adam


@dataclass
class Learned:
    """What is learned of all weights with one group size, `num` groups of `size` inputs, a group a row.

    weight: float32 (num, size). start: float32 (num, 1), the scale to begin with, on the grid. low, high: float32
    (num, 1), least and largest step. rounded, grad: (num, size) in the dtype of the computation.
    """

    weight: Tensor
    start: Tensor
    low: Tensor
    high: Tensor
    rounded: Tensor
    grad: Tensor
    offset: Tensor = field(init=False)
    stretch: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.offset, self.stretch = torch.zeros_like(self.weight), torch.ones_like(self.start)
        self.offset_moments = torch.zeros_like(self.offset), torch.zeros_like(self.offset)
        self.stretch_moments = torch.zeros_like(self.stretch), torch.zeros_like(self.stretch)
        self.kept_steps = torch.empty(self.weight.shape, dtype=torch.int8, device=self.weight.device)
        self.kept_scale = self.start

    def chunks(self) -> Iterator[slice]:
        """Slices of rows that fit the cache of a core, or a share of a GPU's memory."""
        values = CHUNK.get(self.weight.device.type, CHUNK["cpu"]) // TEMPORARIES
        step = max(1, values // self.weight.shape[1])
        for start in range(0, len(self.weight), step):
            yield slice(start, start + step)

    def scale(self, rows: slice) -> Tensor:
        """The scale (r, 1) that would be stored."""
        return on_grid((self.start[rows] * self.stretch[rows]).clamp_min(MIN_SCALE))

    def steps(self, rows: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of some rows: steps (r, size), whether the clamp did nothing (r, size), W / scale (r, size), scale (r, 1)."""
        scale = self.scale(rows)
        ratio = self.weight[rows] / scale
        nearest = (ratio + self.offset[rows]).round_()
        steps = nearest.clamp(self.low[rows], self.high[rows])
        return steps, nearest == steps, ratio, scale

    def gradients(self, rows: slice) -> tuple[Tensor, Tensor]:
        """From `grad`, that of the rounded weight: the gradients of `offset` (r, size) and of `stretch` (r, 1)."""
        steps, inside, ratio, scale = self.steps(rows)
        grad = self.grad[rows].float()
        through = grad * inside
        stretch = (steps.mul_(grad) - ratio.mul_(through)).sum(-1, keepdim=True)
        return through.mul_(scale), stretch * self.start[rows]

    @torch.no_grad()
    def write(self) -> None:
        """Bring `rounded` up to date and empty `grad`."""
        for rows in self.chunks():
            steps, _, _, scale = self.steps(rows)
            self.rounded[rows] = steps.mul_(scale)
        self.grad.zero_()

    @torch.no_grad()
    def step(
        self, number: int, rate: float, stretch_rate: float, widest: float, stretches: tuple[float, float]
    ) -> None:
        """Adam's step `number` (from 1); offsets stay within +-widest, stretches within the range given."""
        for rows in self.chunks():
            offset, stretch = self.gradients(rows)
            adam(self.offset[rows], offset, self.offset_moments, rows, number, rate).clamp_(-widest, widest)
            adam(self.stretch[rows], stretch, self.stretch_moments, rows, number, stretch_rate).clamp_(*stretches)

    @torch.no_grad()
    def keep(self) -> None:
        """Remember the steps and scales as they are now."""
        self.kept_scale = torch.cat([self.scale(rows) for rows in self.chunks()])
        for rows in self.chunks():
            self.kept_steps[rows] = self.steps(rows)[0].to(torch.int8)


def adam(value: Tensor, grad: Tensor, moments: tuple[Tensor, Tensor], rows: slice, number: int, rate: float) -> Tensor:
    """Adam's step `number` (from 1) on `value`, in place; moments: first and second, of which `rows` are its own.

    A value that never had a gradient (no token came, or the input is dead) stays exactly as it is.
    """
    first, second = (moment[rows] for moment in moments)
    first.lerp_(grad, 1 - BETAS[0])
    second.mul_(BETAS[1]).addcmul_(grad, grad, value=1 - BETAS[1])
    size = second.sqrt().mul_((1 - BETAS[1] ** number) ** -0.5).add_(EPSILON)
    return value.addcdiv_(first, size, value=-rate / (1 - BETAS[0] ** number))


class Weights:
    """All covered weights of a block; their modules hold the rounded ones from now on, with a gradient.

    dtype: of the computation.
    """

    def __init__(self, task: BlockTask, dtype: torch.dtype) -> None:
        self.task = task
        names: dict[tuple[int, int], list[str]] = {}
        for name, weight in task.weights.items():
            fmt = task.formats[name]
            names.setdefault((fmt.group_of(weight.shape[1]), fmt.bits), []).append(name)
        self.parts = {tuple(group): self._join(group, *key, dtype) for key, group in names.items()}

    def _join(self, names: list[str], size: int, bits: int, dtype: torch.dtype) -> Learned:
        task = self.task
        weight = torch.cat([task.weights[name].view(-1, size) for name in names])
        start = torch.cat([task.ranges[name][0].view(-1, 1) for name in names])
        zeros = [
            (scale, 2.0 ** (bits - 1) if zero is None else zero) for scale, zero in (task.ranges[n] for n in names)
        ]
        low = torch.cat([-(torch.zeros_like(scale) + zero).view(-1, 1) for scale, zero in zeros])
        rounded, grad = (torch.zeros(weight.shape, dtype=dtype, device=weight.device) for _ in range(2))
        shapes = [task.weights[name].shape for name in names]
        rows = [shape.numel() // size for shape in shapes]
        for name, shape, value, slope in zip(names, shapes, rounded.split(rows), grad.split(rows), strict=True):
            parameter = nn.Parameter(value.view(shape))
            parameter.grad = slope.view(shape)  # backward adds to what is there
            task.linears[name].weight = parameter
        return Learned(weight, start, low, low + 2**bits - 1, rounded, grad)

    def kept(self) -> dict[str, Quantized]:
        """What `Learned.keep` remembered, by name of the linear."""
        found = {}
        for names, part in self.parts.items():
            at = 0
            for name in names:
                weight, (scale, zero) = self.task.weights[name], self.task.ranges[name]
                rows = slice(at, at + scale.numel())
                at = rows.stop
                scale = part.kept_scale[rows].view(scale.shape)
                value = (part.kept_steps[rows] * part.kept_scale[rows]).view(weight.shape)
                found[name] = Quantized(quantize(value, scale, zero, self.task.formats[name]), scale, zero)
        return {name: found[name] for name in self.task.linears}
