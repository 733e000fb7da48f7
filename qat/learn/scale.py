"""A relative change of every group scale: start * (1 + delta). Its gradient needs the gradient of the weight."""

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
PER = "value"


class Options(Section):
    rate: PositiveFloat = Field(3e-3, description="relative to the scale")


def apply(value: Tensor, delta: Tensor, unit: Any) -> Tensor:
    return value * (1 + delta)
