"""What a check of the gate answers with."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from gate._bootstrap import Interval, needed

PASSED, FAILED, UNDECIDED = "passed", "failed", "undecided"


@dataclass(frozen=True)
class Check:
    """One threshold, judged. name: `perplexity.max_relative_increase`. value: None when it is not finite.

    outcome: `passed`, `failed`, or `undecided` while the bound lies between low and high, the ends of the confidence
    interval from `examples` examples; `needed` is about how many would decide. Without an interval these are None.
    """

    name: str
    value: float | None
    bound: float
    passed: bool
    text: str
    outcome: str
    low: float | None = None
    high: float | None = None
    examples: int | None = None
    needed: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def at_most(name: str, value: float | None, bound: float, text: str) -> Check:
    """A check that `value`, which is exact, is finite and not above `bound`."""
    finite = value is not None and math.isfinite(value)
    passed = value is not None and finite and value <= bound
    text = text if finite else f"{name} is not finite"
    return Check(name, value if finite else None, bound, passed, text, PASSED if passed else FAILED)


def estimated(
    name: str, found: Interval | None, bound: float, spec: str, text: str, unit: str, upper: bool = True
) -> Check:
    """A check that an estimate is not above `bound` (below it when not `upper`); found None: it is not finite.

    It passes when its whole interval is on the good side and fails when all of it is on the bad one. spec: how numbers
    are written. text: what is estimated, with {value} and {bound}. unit: what the examples are called.
    """
    if found is None:
        return Check(name, None, bound, False, f"{name} is not finite", FAILED)
    side = "at most" if upper else "at least"
    said = text.format(value=format(found.value, spec)) + f"; {side} {bound:{spec}}"
    wanted, outcome = None, UNDECIDED
    if found.low is not None and found.high is not None:
        good, bad = (found.high <= bound, found.low > bound) if upper else (found.low >= bound, found.high < bound)
        outcome = PASSED if good else FAILED if bad else UNDECIDED
        said += f" (between {found.low:{spec}} and {found.high:{spec}}, {found.examples} {unit})"
    if outcome == UNDECIDED:
        wanted = needed(found, bound)
        said += f"; too few {unit} to decide" + (f", about {wanted} would" if wanted else "")
    return Check(
        name, found.value, bound, outcome == PASSED, said, outcome, found.low, found.high, found.examples, wanted
    )


@dataclass(frozen=True)
class Fault:
    """Something in an exported directory that is not as it must be.

    kind: a short fixed word, one per rule. where: the file or tensor. what: what is wrong, with the value.
    """

    kind: str
    where: str
    what: str
    rule: str
    way_out: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.rule}; {self.way_out}"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "text": str(self)}
