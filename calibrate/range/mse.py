"""The clip of each (row, group) with the least squared error of the weight.

It does not see the inputs, and on language models it can be worse than `max`: prefer `activation`.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from calibrate.inputs import InputStats
from calibrate.range._search import Range, search
from qat.scheme import Section, TensorFormat

VERSION = 1
NEEDS: set[str] = set()
DTYPES = {"int4", "int8"}


class Options(Section):
    """ratios: how many clip ratios are tried, evenly spaced from 1 down to smallest."""

    ratios: int = Field(40, ge=1)
    smallest: float = Field(0.5, gt=0, le=1)


def find(weight: Tensor, fmt: TensorFormat, inputs: InputStats | None, options: Options) -> Range:
    """Scale float32 (N, K / g) and zero uint8 or None of a weight float32 (N, K), int4 or int8."""
    return search(weight, fmt, None, options.ratios, options.smallest)
