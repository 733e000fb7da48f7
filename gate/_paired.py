"""Estimates of a state against the parent, with intervals, from the sums per window of `Measurement.as_dict`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gate._bootstrap import Interval, Sampling, interval, unchanged

LEAST = math.nextafter(0, 1)


def kl(measured: dict[str, Any], sampling: Sampling) -> Interval | None:
    """Mean KL to the parent in nats per token; None when it is not finite. It is never below 0, nor is the interval:
    one token that differs shows that the mean is not 0."""
    found = _mean(measured, measured["windows"]["kl"], sampling)
    if found is None or found.low is None or found.value <= 0:
        return found
    return found._replace(low=max(found.low, LEAST))


def top1(measured: dict[str, Any], sampling: Sampling) -> Interval | None:
    """Share of positions whose most likely token is the parent's; one that is not shows that the share is below 1."""
    found = _mean(measured, measured["windows"]["top1"], sampling)
    if found is None or found.high is None or found.value >= 1:
        return found
    return found._replace(high=min(found.high, math.nextafter(1, 0)))


def perplexity_increase(measured: dict[str, Any], parent: dict[str, Any], sampling: Sampling) -> Interval | None:
    """Perplexity over the parent's, less 1: exp of the mean difference of negative log-likelihoods on each window.

    None when it is not finite. Raises ValueError when the two were measured on different numbers of windows.
    """
    ours, theirs = measured["windows"]["nll"], parent["windows"]["nll"]
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} windows against the parent's {len(theirs)}: they cannot be paired")
    if None in ours or None in theirs:
        return None
    found = _mean(measured, [a - b for a, b in zip(ours, theirs, strict=True)], sampling)
    return found.map(lambda x: math.expm1(min(x, 700.0))) if found else None


def gain(name: str, measured: dict[str, Any], parent: dict[str, Any], sampling: Sampling) -> Interval:
    """Mean score on the task `name` less the parent's, paired by example.

    Of a state that computes what the parent computes (KL 0) it is 0 and nothing is left to chance. Else, where no
    score changed, the interval is what so many examples can have missed. Scores are from 0 to 1, so no end is farther
    than 1 from 0. Raises ValueError for different numbers.
    """
    pairs = zip(measured["tasks"][name]["scores"], parent["tasks"][name]["scores"], strict=True)
    changes = [ours - theirs for ours, theirs in pairs]
    if any(changes) or measured["kl"] == 0:
        found = interval(changes, sampling)
        low, high = (None if end is None else min(max(end, -1.0), 1.0) for end in (found.low, found.high))
        return found._replace(low=low, high=high)
    return unchanged(len(changes), sampling)


def ratio(ours: Sequence[float], theirs: Sequence[float], sampling: Sampling) -> Interval:
    """Geometric mean of ours / theirs, positive numbers of the same pairs. Raises ValueError for different numbers."""
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    return interval(logs, sampling).map(math.exp)


def negated(found: Interval) -> Interval:
    """The estimate and its interval with the other sign."""
    low, high = (None if end is None else -end for end in (found.high, found.low))
    return found._replace(value=0.0 - found.value, low=low, high=high)  # not -0.0


def _mean(measured: dict[str, Any], sums: list[float | None], sampling: Sampling) -> Interval | None:
    """Of sums over windows of equal length, the mean per token."""
    values = [value for value in sums if value is not None]
    if len(values) < len(sums):
        return None
    tokens = measured["num_tokens"] / len(sums)
    return interval([value / tokens for value in values], sampling)
