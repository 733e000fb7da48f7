"""Which code: the stored one or a neighbour, learned end to end; the gradient passes straight through the rounding.

A float32 number per weight, its gradient and two moments, and the codes before and after: 35 bytes per weight beside
the model, so this is for small models.
The change is held within one code (GPTQ's codes are not the nearest ones; a wider window forgets them). `start:
residual` begins where the weight that was rounded lies between the codes, so that one near the boundary moves first. It
is for codes that are the nearest: behind `learned` it undoes what that chose (benchmarks/LOG.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PositiveFloat

from qat.scheme import Section

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 2  # 2: a transform before the rounding is part of the residual
DTYPES = {"int4", "int8"}
NEEDS_ZERO = False
PART = "codes"
PER = "value"
BYTES_PER_WEIGHT = 35


class Options(Section):
    rate: PositiveFloat = Field(1e-3, description="in codes; half a code is what it takes to move from a stored code")
    start: Literal["stored", "residual"] = Field(
        "residual", description="where between the codes learning begins; after gptq or learned take stored"
    )


def apply(value: Tensor, delta: Tensor, unit: Any) -> Tensor:
    return value + delta


def begin(student: Any, options: Options, windows: Tensor) -> None:
    from qat import starts

    if options.start == "residual":
        student.delta["round"].data.copy_(starts.residuals(student))
