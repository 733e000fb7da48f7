"""Each weight takes the nearest code.

Contract of a rounding: `codes` gets the weight and the range chosen for it and returns a `Quantized`. The scale and
zero point it returns are the ones stored, so a method may refit the scale while it rounds, as long as the scale is on
the grid and the codes were chosen for that very scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from calibrate.inputs import InputStats
from calibrate.rows import at, each
from qat.quant import Quantized, quantize
from qat.scheme import Section, TensorFormat

VERSION = 1
NEEDS: set[str] = set()
DTYPES = {"int4", "int8", "fp8_e4m3"}


class Options(Section):
    """None."""


def codes(
    weight: Tensor, scale: Tensor, zero: Tensor | None, fmt: TensorFormat, inputs: InputStats | None, options: Options
) -> Quantized:
    """Codes of a weight float32 (N, K) at scale float32 of `fmt.scale_shape` and zero uint8 or None."""
    unit = fmt.scale_rows
    parts = each(weight, lambda rows: quantize(weight[rows], at(scale, rows, unit), at(zero, rows), fmt), unit=unit)
    return Quantized(torch.cat(parts), scale, zero)
