"""What an export takes on disk. Exact, so it has no confidence interval."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gate._bootstrap import Sampling
from gate._check import Check, at_most
from qat.scheme import Section

VERSION = 1


class Options(Section):
    """max_bits_per_weight: stored bits of the quantized linears per weight of theirs, scales and biases counted.

    max_mb: the weight files, in millions of bytes. null: no bound.
    """

    max_bits_per_weight: float | None = Field(None, gt=0)
    max_mb: float | None = Field(None, gt=0)


def judge(measured: dict[str, Any], parent: dict[str, Any], options: Options, sampling: Sampling) -> list[Check]:
    """The checks of one exported directory. measured: its `size_on_disk` in bytes and `bits_per_weight`."""
    checks = []
    if options.max_bits_per_weight is not None:
        bits = measured["bits_per_weight"]
        text = f"{bits:.3f} bits per weight; at most {options.max_bits_per_weight:g}"
        checks.append(at_most("size.max_bits_per_weight", bits, options.max_bits_per_weight, text))
    if options.max_mb is not None:
        mb = measured["size_on_disk"] / 1e6
        text = f"{mb:.2f} MB of weights; at most {options.max_mb:g}"
        checks.append(at_most("size.max_mb", mb, options.max_mb, text))
    return checks
