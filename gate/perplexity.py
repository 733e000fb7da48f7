"""Perplexity on held-out text against the parent's."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gate._check import Check, at_most
from qat.scheme import Section

VERSION = 1


class Options(Section):
    """max_relative_increase: 0.05 allows a perplexity 5% above the parent's; null: no bound."""

    max_relative_increase: float | None = Field(None, ge=0)


def judge(measured: dict[str, Any], parent: dict[str, Any], options: Options) -> list[Check]:
    """The checks of one state. measured, parent: `Measurement.as_dict()` on the same windows."""
    bound = options.max_relative_increase
    if bound is None:
        return []
    ours, theirs = measured["perplexity"], parent["perplexity"]
    name = "perplexity.max_relative_increase"
    if ours is None:
        return [at_most(name, None, bound, "")]
    increase = (ours - theirs) / theirs
    text = f"perplexity {ours:.3f}, the parent's {theirs:.3f}: {increase:+.2%}; at most {bound:+.2%}"
    return [at_most(name, increase, bound, text)]
