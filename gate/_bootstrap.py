"""Confidence intervals of means over examples, and how many examples would settle a bound.

The examples (windows of text, questions of a task) are drawn again with replacement, parent and candidate together, so
that what is hard for both cancels (Efron and Tibshirani 1993, chapter 13: the percentile interval). Of a few examples
that interval is too short (Hesterberg 2015, section 4), so each end is the farther one of it and of Student's t.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

DRAWS_AT_ONCE = 2**22  # indices alive at once: 32 MiB, and as much for the values


@dataclass(frozen=True)
class Sampling:
    """confidence: of a two-sided interval. resamples: of the bootstrap, by `seed`."""

    confidence: float = 0.99
    resamples: int = 10_000
    seed: int = 0


class Interval(NamedTuple):
    """An estimate from so many examples and its confidence interval; low and high are None where there is none.

    unseen: no example differed, and the ends are what so many can have missed (`unchanged`).
    """

    value: float
    low: float | None
    high: float | None
    examples: int
    unseen: bool = False

    def map(self, rising: Callable[[float], float]) -> Interval:
        """The interval of an increasing function of the estimated number."""
        low, high = (None if end is None else rising(end) for end in (self.low, self.high))
        return self._replace(value=rising(self.value), low=low, high=high)


def interval(values: Sequence[float], sampling: Sampling) -> Interval:
    """The mean of `values`, one for each example, with its interval; without ends for fewer than two examples.

    Examples that are all equal give an interval of that number alone. Raises ValueError for no values, or some that are
    not finite. Asked again for the same values, it remembers: bounds, tables and reports all ask.
    """
    return _interval(tuple(values), sampling)


@lru_cache(maxsize=256)
def _interval(values: tuple[float, ...], sampling: Sampling) -> Interval:
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or not len(x) or not np.isfinite(x).all():
        raise ValueError(f"an interval needs finite values of one or more examples, got shape {x.shape}")
    mean, count = math.fsum(x) / len(x), len(x)
    if count < 2:
        return Interval(mean, None, None, count)
    if x.min() == x.max():
        same = float(x[0])
        return Interval(same, same, same, count)
    tail = (1 - sampling.confidence) / 2
    low, high = np.quantile(resampled_means(x, sampling), [tail, 1 - tail])
    reach = student_t(1 - tail, count - 1) * float(x.std(ddof=1)) / math.sqrt(count)
    return Interval(mean, min(float(low), mean - reach), max(float(high), mean + reach), count)


def unchanged(count: int, sampling: Sampling) -> Interval:
    """The mean change of answers, each -1, 0 or 1, of which not one in `count` examples changed.

    Resampling what did not happen shows nothing. A share p of changes stays unseen with probability (1 - p)^n, so that
    at the confidence asked for p, and the mean either way, is at most the p of Clopper and Pearson (1934) for none of
    n: about 5.3 / n at 99%.
    """
    reach = -math.expm1(math.log((1 - sampling.confidence) / 2) / count)
    return Interval(0.0, -reach, reach, count, unseen=True)


def resampled_means(x: NDArray[np.float64], sampling: Sampling) -> NDArray[np.float64]:
    """Means (resamples,) of as many draws from `x` (n,) with replacement as it has values; equal for equal seeds."""
    generator = np.random.default_rng(sampling.seed)
    rows = max(1, DRAWS_AT_ONCE // len(x))
    means = []
    for start in range(0, sampling.resamples, rows):
        drawn = generator.integers(len(x), size=(min(rows, sampling.resamples - start), len(x)))
        means.append(x[drawn].mean(1))
    return np.concatenate(means)


def needed(estimate: Interval, bound: float) -> int | None:
    """About how many examples would bring the end of the interval that is beyond `bound` back to it.

    Its distance from the estimate shrinks with the square root of the number of examples, or as `unchanged` says. None
    when no number would: the estimate is the bound, or has no interval.
    """
    if estimate.low is None or estimate.high is None or estimate.value == bound:
        return None
    if estimate.unseen:
        return math.ceil(estimate.examples * math.log1p(-estimate.high) / math.log1p(-min(abs(bound), 0.999)))
    reach = estimate.high - estimate.value if bound > estimate.value else estimate.value - estimate.low
    return max(estimate.examples + 1, math.ceil(estimate.examples * (reach / (bound - estimate.value)) ** 2))


def student_t(probability: float, freedom: int) -> float:
    """The quantile of Student's t distribution for a probability above 1/2 (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    z = NormalDist().inv_cdf(probability)
    if freedom > 200:
        return z + (z**3 + z) / (4 * freedom)  # 26.7.5; the next term is below 1e-4
    low, high = 0.0, 1e6
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if (1 + _within(middle, freedom)) / 2 > probability else (middle, high)
    return high


def _within(t: float, freedom: int) -> float:
    """P(|T| < t) for Student's t with a whole number of degrees of freedom."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(2 if odd else 1, freedom, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total
