"""A compensation bias per output channel: start + unit * delta, where the unit is the size of the linear's outputs.

One rate then fits layers of any size. `start: mean` begins with the closed-form correction of each output's mean error
(Nagel et al. 2019, "Data-free quantization through weight equalization and bias correction", section 4.2), with inputs
from the quantized prefix and without the first tokens of a window: their massive activations would swamp the mean.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PositiveFloat

from qat.scheme import Section, matches

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 2  # 2: start: mean knows of a transform before the rounding
DTYPES = {"int4", "int8", "fp8_e4m3"}
NEEDS_ZERO = False
PART = "bias"
PER = "value"


class Options(Section):
    rate: PositiveFloat = Field(3e-3, description="in units of the rms output of the linear")
    start: Literal["stored", "mean"] = Field("stored", description="stored: the artifact's bias, or 0; mean: see above")
    linears: list[str] | None = Field(
        None,
        min_length=1,
        description="which get one, within a block, such as mlp.up_proj or mlp.*; null: all that engines load",
    )
    skip_tokens: int = Field(4, ge=0, description="start: mean leaves out so many first tokens of each window")


def apply(value: Tensor, delta: Tensor, unit: Any) -> Tensor:
    return value + unit * delta


def places(options: Options, slots: Collection[str]) -> frozenset[str]:
    """The linears of a block that get a bias. slots: those whose bias the engines load."""
    patterns = ["*"] if options.linears is None else options.linears
    return frozenset(leaf for leaf in slots if any(matches(pattern, leaf) for pattern in patterns))


def check(options: Options, length: int, slots: Collection[str]) -> None:
    if options.start == "mean" and options.skip_tokens >= length:
        raise ValueError(f"skip_tokens {options.skip_tokens} leaves nothing of windows of {length}; take fewer")
    for pattern in (options.linears or ()) if slots else ():
        if not any(matches(pattern, leaf) for leaf in slots):
            loaded = ", ".join(sorted(slots))
            raise ValueError(f"linears {pattern!r} matches none whose bias the engines load: {loaded}")


def begin(student: Any, options: Options, windows: Tensor) -> None:
    from qat import starts

    if options.start == "mean":
        starts.correct_means(student, windows, options.skip_tokens)
    student.parts[PART].unit = starts.output_units(student, windows)
