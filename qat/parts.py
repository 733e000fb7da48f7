"""Kinds of stored tensors that training changes, each in one flat float32 vector.

Rounding, optimizer and reduction over ranks are then a few kernels, whatever the number of layers. A linear sees views:
`current` is what the forward pass uses, exactly what would be exported; `grad` is where backward adds.

    bias   (N, 1)       on the grid that bfloat16 and float16 share
    scale  (N, K / g)   on that grid and at least 2^-14
    zero   (N, K / g)   integers
    codes  (N, K)       integers, at most one away from the stored code
    norm   (H, 1)       weights of the blocks' norms, on the grid
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qat.quant import MIN_SCALE, on_grid

PARTS = ("bias", "scale", "zero", "codes", "norm")
INT4 = (0, 15)


class OnGrid(torch.autograd.Function):
    """`quant.on_grid`; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return on_grid(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class AtLeast(torch.autograd.Function):
    """x, or `low` where that is more; the gradient passes, except where it leads further down: `clamp_min` would give
    a value that has once gone below no gradient to come back by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float) -> Tensor:
        ctx.save_for_backward(x < low)
        return x.clamp_min(low)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (below,) = ctx.saved_tensors  # descent moves against the gradient
        return grad.masked_fill(below & (grad > 0), 0), None


class ToInteger(torch.autograd.Function):
    """Nearest integer within low..high (tensors or numbers); the gradient passes, except where it leads further out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: Any, high: Any) -> Tensor:
        ctx.save_for_backward((x > high).to(torch.int8) - (x < low).to(torch.int8))
        return x.round().clamp(low, high)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (outside,) = ctx.saved_tensors  # descent moves against the gradient
        return grad.masked_fill(grad * outside < 0, 0), None, None


class Segment(NamedTuple):
    """Neighbouring tensors of equal width, as one matrix (rows, columns)."""

    rows: int
    columns: int
    values: slice
    row_range: slice


class Part:
    """All learned tensors of one kind.

    tensors: by name, float32 (rows, columns). learnables: modules of qat/learn by name. bounds: by name, the lowest and
    highest integer of `zero` and `codes`; where it has none, those of int4.
    """

    def __init__(
        self,
        name: str,
        tensors: Mapping[str, Tensor],
        learnables: Mapping[str, ModuleType],
        bounds: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    ) -> None:
        assert name in PARTS and tensors and learnables
        self.name, self.learnables = name, dict(sorted(learnables.items()))
        # by width, so that a factor per row is applied to a few matrices; then by name: every process has this order
        self.shapes = {n: tensors[n].shape for n in sorted(tensors, key=lambda n: (tensors[n].shape[1], n))}
        self.start = torch.cat([tensors[n].flatten() for n in self.shapes])
        low, high = zip(*(bounds.get(n, INT4) for n in self.shapes), strict=True)
        self.low, self.high = self._by_value(low), self._by_value(high)
        self.segments: list[Segment] = []
        for rows, columns in self.shapes.values():
            last = self.segments[-1] if self.segments else Segment(0, 0, slice(0, 0), slice(0, 0))
            value, row = last.values.stop, last.row_range.stop
            if last.columns == columns:
                self.segments.pop()
                rows, value, row = rows + last.rows, last.values.start, last.row_range.start
            self.segments.append(Segment(rows, columns, slice(value, value + rows * columns), slice(row, row + rows)))
        self.num_rows = self.segments[-1].row_range.stop
        self.unit: Tensor | None = None
        # a sum over each row is all the gradient that factors per row need
        self.per_row = all(module.PER == "row" for module in self.learnables.values())
        self.current = self.start.clone()
        self.grad = torch.zeros(self.num_rows if self.per_row else len(self.start), device=self.start.device)

    def _by_value(self, numbers: Sequence[int]) -> Tensor | int:
        """One number a tensor, as int8 for each value; by itself when all are the same."""
        if len(set(numbers)) == 1:
            return numbers[0]
        parts = zip(numbers, self.shapes.values(), strict=True)
        flat = [torch.full((rows * columns,), number, dtype=torch.int8) for number, (rows, columns) in parts]
        return torch.cat(flat).to(self.start.device)

    def size_of(self, learnable: str) -> int:
        """How many numbers a learnable of this part has."""
        return self.num_rows if self.learnables[learnable].PER == "row" else len(self.start)

    def views(self, flat: Tensor, by_row: bool) -> dict[str, Tensor]:
        """The pieces of a flat vector by name: (rows, columns), or (rows,) when it has a number per row."""
        sizes = [rows if by_row else rows * columns for rows, columns in self.shapes.values()]
        pieces = zip(self.shapes.items(), flat.split(sizes), strict=True)
        return {name: piece if by_row else piece.view(shape) for (name, shape), piece in pieces}

    def value(self, deltas: Mapping[str, Tensor]) -> Tensor:
        """The flat values as they would be exported, with a gradient to `deltas`."""
        pieces = []
        for rows, columns, values, row_range in self.segments:
            piece = self.start[values].view(rows, columns)
            unit: Any = 1.0 if self.unit is None else self.unit[values].view(rows, columns)
            for learnable, module in self.learnables.items():
                by_row = module.PER == "row"
                delta = deltas[learnable][row_range if by_row else values].view(rows, 1 if by_row else columns)
                piece = module.apply(piece, delta, unit)
            pieces.append(piece.flatten())
        return self._rounded(pieces[0] if len(pieces) == 1 else torch.cat(pieces))

    def _rounded(self, x: Tensor) -> Tensor:
        if self.name == "zero":
            return ToInteger.apply(x, self.low, self.high)
        if self.name == "codes":
            return ToInteger.apply(x, (self.start - 1).clamp(min=self.low), (self.start + 1).clamp(max=self.high))
        if self.name == "scale":
            return OnGrid.apply(AtLeast.apply(x, MIN_SCALE))
        return OnGrid.apply(x)

    def value_grad(self) -> Tensor:
        """The gradient by value. Per row, `grad` is the sum over a row of dL/dscale * scale: spread evenly over it."""
        if not self.per_row:
            return self.grad
        pieces = [
            (self.grad[row_range].view(-1, 1) / (columns * self.current[values].view(rows, columns))).flatten()
            for rows, columns, values, row_range in self.segments
        ]
        return torch.cat(pieces)
