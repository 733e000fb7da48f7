"""How far the next-token distribution is from the parent's: KL(parent || candidate), and agreement of the top token."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gate import _paired
from gate._bootstrap import Sampling
from gate._check import Check, estimated
from qat.scheme import Section

VERSION = 2


class Options(Section):
    """max_kl: nats per token. min_top1: share of positions whose most likely token is the parent's. null: no bound."""

    max_kl: float | None = Field(None, ge=0)
    min_top1: float | None = Field(None, ge=0, le=1)


def judge(measured: dict[str, Any], parent: dict[str, Any], options: Options, sampling: Sampling) -> list[Check]:
    """The checks of one state. measured, parent: `Measurement.as_dict()` on the same windows."""
    checks = []
    if options.max_kl is not None:
        found, text = _paired.kl(measured, sampling), "KL to the parent {value} nats per token"
        checks.append(estimated("divergence.max_kl", found, options.max_kl, ".5f", text, "windows"))
    if options.min_top1 is not None:
        found, text = _paired.top1(measured, sampling), "top token agrees with the parent's in {value}"
        checks.append(estimated("divergence.min_top1", found, options.min_top1, ".2%", text, "windows", upper=False))
    return checks
