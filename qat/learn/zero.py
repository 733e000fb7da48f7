"""The zero point of every group, with the gradient passed straight through its rounding.

Engines store it as an integer of the width of a code, so it moves in whole steps, and with frozen codes such a step
moves all weights of its group by a whole scale: 12 times the squared error of rounding. It is here for completeness and
for use beside `round`; within some hundred steps it does not pay (benchmarks/LOG.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field, PositiveFloat

from qat.scheme import Section

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 1
DTYPES = {"int4"}
NEEDS_ZERO = True
PART = "zero"
PER = "value"


class Options(Section):
    rate: PositiveFloat = Field(1e-3, description="in steps of the code; half a step is what it takes to move")


def apply(value: Tensor, delta: Tensor, unit: Any) -> Tensor:
    return value + delta
