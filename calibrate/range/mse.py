"""The clip of each (row, group) with the least squared error of the weight.

It does not see the inputs, and on language models it can be worse than `max`: prefer `activation`.

Static scales of activations: the clip with the least squared error of the magnitudes seen, each rounded to the levels
that the number format has.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from calibrate.histogram import Histogram
from calibrate.inputs import InputStats
from calibrate.range._clip import clips, levels, nearest, scale_of
from calibrate.range._search import Range, search
from qat.scheme import Section, TensorFormat

VERSION = 1
NEEDS: set[str] = set()
DTYPES = {"int4", "int8"}
INPUTS = {"int8", "fp8_e4m3"}


class Options(Section):
    """ratios: how many clip ratios are tried, evenly spaced from 1 down to smallest."""

    ratios: int = Field(40, ge=1)
    smallest: float = Field(0.5, gt=0, le=1)


class InputOptions(Section):
    """candidates: how many clips are tried, from the largest magnitude down to `smallest` times it, evenly in log."""

    candidates: int = Field(256, ge=1)
    smallest: float = Field(0.004, gt=0, le=1)


def find(weight: Tensor, fmt: TensorFormat, inputs: InputStats | None, options: Options) -> Range:
    """Scale float32 (N, K / g) and zero uint8 or None of a weight float32 (N, K), int4 or int8."""
    return search(weight, fmt, None, options.ratios, options.smallest)


def find_input(histogram: Histogram, fmt: TensorFormat, options: InputOptions) -> Tensor:
    """Scale float32 (1,) of inputs with these magnitudes. Raises ValueError for an empty or non-finite histogram."""
    values, counts = histogram.seen()
    scales = scale_of(clips(histogram.amax, options.candidates, options.smallest), fmt)
    grid = levels(fmt)
    stored = grid[nearest(values, scales, grid)] * scales.double()[:, None]  # (candidates, bins)
    best = ((stored - values).square_() @ counts).argmin()
    return scales[best].view(1).to(histogram.counts.device)
