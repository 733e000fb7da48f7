"""Static scales of activations: the clip below which a stated share of all magnitudes lies (weights: none)."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from calibrate.histogram import Histogram
from calibrate.range._clip import scale_of
from qat.scheme import Section, TensorFormat

VERSION = 1
NEEDS: set[str] = set()
DTYPES: set[str] = set()  # a group has 64 or 128 weights: there is no 99.99th percentile of them
INPUTS = {"int8", "fp8_e4m3"}


class InputOptions(Section):
    """percentile: of the magnitudes, zeros included."""

    percentile: float = Field(99.99, gt=0, le=100)


def find_input(histogram: Histogram, fmt: TensorFormat, options: InputOptions) -> Tensor:
    """Scale float32 (1,) of inputs with these magnitudes. Raises ValueError for an empty or non-finite histogram."""
    values, counts = histogram.seen()
    if options.percentile == 100:
        return scale_of(histogram.amax.view(1), fmt)
    below = counts.cumsum(0) >= options.percentile / 100 * counts.sum()
    return scale_of(values[below][:1], fmt).to(histogram.counts.device)
