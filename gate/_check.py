"""What a check of the gate answers with."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """One threshold, judged. name: `perplexity.max_relative_increase`. value: None when it is not finite."""

    name: str
    value: float | None
    bound: float
    passed: bool
    text: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def at_most(name: str, value: float | None, bound: float, text: str) -> Check:
    """A check that `value` is finite and not above `bound`."""
    return _check(name, value, bound, value is not None and value <= bound, text)


def at_least(name: str, value: float | None, bound: float, text: str) -> Check:
    """A check that `value` is finite and not below `bound`."""
    return _check(name, value, bound, value is not None and value >= bound, text)


def _check(name: str, value: float | None, bound: float, holds: bool, text: str) -> Check:
    finite = value is not None and math.isfinite(value)
    return Check(name, value if finite else None, bound, holds and finite, text if finite else f"{name} is not finite")


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
