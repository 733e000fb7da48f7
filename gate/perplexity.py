"""Perplexity on held-out text against the parent's."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gate import _paired
from gate._bootstrap import Sampling
from gate._check import Check, estimated
from qat.scheme import Section

VERSION = 2


class Options(Section):
    """max_relative_increase: 0.05 allows a perplexity 5% above the parent's; null: no bound."""

    max_relative_increase: float | None = Field(None, ge=0)


def judge(measured: dict[str, Any], parent: dict[str, Any], options: Options, sampling: Sampling) -> list[Check]:
    """The checks of one state. measured, parent: `Measurement.as_dict()` on the same windows."""
    bound, name = options.max_relative_increase, "perplexity.max_relative_increase"
    if bound is None:
        return []
    found = None
    text = ""
    if measured["perplexity"] is not None:
        found = _paired.perplexity_increase(measured, parent, sampling)
        text = f"perplexity {measured['perplexity']:.3f}, the parent's {parent['perplexity']:.3f}: {{value}}"
    return [estimated(name, found, bound, "+z.2%", text, "windows")]
