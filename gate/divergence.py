"""How far the next-token distribution is from the parent's: KL(parent || candidate), and agreement of the top token."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gate._check import Check, at_least, at_most
from qat.scheme import Section

VERSION = 1


class Options(Section):
    """max_kl: nats per token. min_top1: share of positions whose most likely token is the parent's. null: no bound."""

    max_kl: float | None = Field(None, ge=0)
    min_top1: float | None = Field(None, ge=0, le=1)


def judge(measured: dict[str, Any], parent: dict[str, Any], options: Options) -> list[Check]:
    """The checks of one state. measured, parent: `Measurement.as_dict()` on the same windows."""
    checks = []
    kl, top1 = measured["kl"], measured["top1"]
    if options.max_kl is not None:
        text = f"KL to the parent {_number(kl, '.5f')} nats per token; at most {options.max_kl:g}"
        checks.append(at_most("divergence.max_kl", kl, options.max_kl, text))
    if options.min_top1 is not None:
        text = f"top token agrees with the parent's in {_number(top1, '.2%')}; at least {options.min_top1:.2%}"
        checks.append(at_least("divergence.min_top1", top1, options.min_top1, text))
    return checks


def _number(value: float | None, spec: str) -> str:
    return "?" if value is None else format(value, spec)
