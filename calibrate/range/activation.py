"""The clip of each (row, group) with the least squared error of the output, inputs taken as uncorrelated.

Minimises sum_j E[x_j^2] (W[n, j] - W_q[n, j])^2 over clip ratios: the diagonal of the layer's Hessian, as in AWQ's clip
search (Lin et al. 2023, section 3.2) but per row and with the second moment instead of sampled inputs.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from calibrate.inputs import InputStats
from calibrate.range._search import Range, search
from qat.scheme import Section, TensorFormat

VERSION = 1
NEEDS = {"second_moment"}
DTYPES = {"int4", "int8"}
INPUTS: set[str] = set()


class Options(Section):
    """ratios: how many clip ratios are tried, evenly spaced from 1 down to smallest."""

    ratios: int = Field(40, ge=1)
    smallest: float = Field(0.5, gt=0, le=1)


def find(weight: Tensor, fmt: TensorFormat, inputs: InputStats | None, options: Options) -> Range:
    """Scale float32 (N, K / g) and zero uint8 or None of a weight float32 (N, K), int4 or int8."""
    assert inputs is not None and inputs.second_moment is not None
    return search(weight, fmt, inputs.second_moment, options.ratios, options.smallest)
