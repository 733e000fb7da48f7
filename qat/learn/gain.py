"""A factor per output channel, folded into all scales of its row: needs no slot in any engine.

The product lies on the grid of the scales, so the forward pass uses what is stored. The gradient of a factor is a sum
over tokens of gradient times output: no gradient of the weight is formed when `scale` is not learned beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field, PositiveFloat

from qat.scheme import Section

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 1
DTYPES = {"int4", "int8"}
NEEDS_ZERO = False
PART = "scale"
PER = "row"


class Options(Section):
    rate: PositiveFloat = Field(3e-3, description="relative to the output")


def apply(value: Tensor, delta: Tensor, unit: Any) -> Tensor:
    return value * (1 + delta)
