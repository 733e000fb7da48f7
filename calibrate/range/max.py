"""Nothing is clipped: the scale holds the largest weight (round-to-nearest, the baseline every other range must beat).

int4: amax / 7.5 per group, or (max - min) / 15 with a zero point; a group that already lies on a grid keeps its grid.
int8: amax / 127.5 per group. fp8: amax / 448 per output channel, of each block, or of the whole tensor.
Static scales of activations: amax / 448 for fp8, amax / 127 for int8.
"""

from __future__ import annotations

from torch import Tensor

from calibrate.histogram import Histogram
from calibrate.inputs import InputStats
from calibrate.range._clip import scale_of
from calibrate.range._search import Range, join, start
from calibrate.rows import each
from qat.quant import block_amax, max_scale
from qat.scheme import Section, TensorFormat

VERSION = 1
NEEDS: set[str] = set()
DTYPES = {"int4", "int8", "fp8_e4m3"}
INPUTS = {"int8", "fp8_e4m3"}


class Options(Section):
    """None."""


class InputOptions(Section):
    """None."""


def find(weight: Tensor, fmt: TensorFormat, inputs: InputStats | None, options: Options) -> Range:
    """Scale float32 of `fmt.scale_shape` and zero uint8 or None of a weight float32 (N, K)."""
    if fmt.is_int:
        return join(each(weight, lambda rows: start(weight[rows], fmt)))
    if fmt.per == "block":
        return max_scale(block_amax(weight), fmt), None
    amax = weight.abs().amax(-1, keepdim=True)
    return max_scale(amax.amax().view(1, 1) if fmt.per == "tensor" else amax, fmt), None


def find_input(histogram: Histogram, fmt: TensorFormat, options: InputOptions) -> Tensor:
    """Scale float32 (1,) of inputs with these magnitudes. Raises ValueError for an empty or non-finite histogram."""
    histogram.seen()
    return scale_of(histogram.amax.view(1), fmt)
