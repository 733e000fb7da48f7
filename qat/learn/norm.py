"""A relative change of what the RMSNorms of the blocks multiply with: needs no slot in any engine.

Gemma multiplies with 1 + weight: there the change is of that sum. unit: the sum (rows, 1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field, PositiveFloat

from qat.scheme import Section

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 1
DTYPES = {"int4", "int8", "fp8_e4m3"}
NEEDS_ZERO = False
PART = "norm"
COMPILES = False  # a norm that is learned has a class of its own, for which torch.compile starts again
PER = "value"


class Options(Section):
    rate: PositiveFloat = Field(2e-3, description="relative to the weight")


def apply(value: Tensor, delta: Tensor, unit: Any) -> Tensor:
    return value + unit * delta


def begin(student: Any, options: Options, windows: Tensor) -> None:
    from qat import starts

    student.parts[PART].unit = starts.norm_factors(student)
