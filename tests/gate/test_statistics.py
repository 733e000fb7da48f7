"""Confidence intervals against slow loops and tables, and what they make of a verdict."""

from __future__ import annotations

import math
import random
import statistics as standard
from typing import Any

import pytest

from gate import _paired, divergence, perplexity, size, statistics
from gate._bootstrap import Interval, Sampling, interval, needed, student_t, unchanged
from gate._measure import Measurement
from gate.stage import Exported, verdict

QUICK = Sampling(confidence=0.95, resamples=2000)
TOKENS = 50


def slow_percentiles(values: list[float], resamples: int, confidence: float) -> tuple[float, float]:
    drawn, generator = [], random.Random(1)
    for _ in range(resamples):
        drawn.append(standard.fmean(generator.choice(values) for _ in values))
    cuts = standard.quantiles(drawn, n=1000, method="inclusive")
    tail = round(500 * (1 - confidence))
    return cuts[tail - 1], cuts[1000 - tail - 1]


def test_the_interval_is_that_of_a_slow_bootstrap() -> None:
    generator = random.Random(0)
    values = [generator.expovariate(1.0) for _ in range(60)]  # skewed, as KL is
    low, high = slow_percentiles(values, 4000, 0.9)
    found = interval(values, Sampling(confidence=0.9, resamples=20_000))
    spread = standard.stdev(values) / math.sqrt(60)
    student = 1.671 * spread  # t of 59 degrees of freedom, from a table
    assert found.value == pytest.approx(standard.fmean(values))
    assert found.low is not None and found.high is not None
    assert found.low == pytest.approx(min(low, found.value - student), abs=0.06 * spread)
    assert found.high == pytest.approx(max(high, found.value + student), abs=0.06 * spread)
    assert found == interval(values, Sampling(confidence=0.9, resamples=20_000))


@pytest.mark.parametrize("examples", [5, 30])
def test_intervals_hold_the_truth_about_as_often_as_they_say(examples: int) -> None:
    generator, held = random.Random(3), 0
    for seed in range(1000):
        values = [generator.gauss(3.0, 2.0) for _ in range(examples)]
        found = interval(values, Sampling(confidence=0.95, resamples=1000, seed=seed))
        assert found.low is not None and found.high is not None
        held += found.low <= 3.0 <= found.high
    assert 0.93 <= held / 1000 <= 0.97  # a share of 0.95 from 1,000 has a standard error of 0.007


@pytest.mark.parametrize(("freedom", "t"), [(1, 12.706), (2, 4.303), (4, 2.776), (9, 2.262), (30, 2.042), (999, 1.962)])
def test_student_as_in_the_tables(freedom: int, t: float) -> None:
    assert student_t(0.975, freedom) == pytest.approx(t, abs=6e-4)


@pytest.mark.parametrize("count", [1, 2, 40, 528])
@pytest.mark.parametrize("confidence", [0.9, 0.99])
def test_what_is_unseen_is_as_likely_as_the_confidence_leaves(count: int, confidence: float) -> None:
    """A share of changes at the end of the interval shows none in `count` draws with the probability of a tail."""
    found = unchanged(count, Sampling(confidence))
    assert found.value == 0 and found.high is not None and found.low == -found.high
    assert (1 - found.high) ** count == pytest.approx((1 - confidence) / 2)
    for bound in (0.001, 0.02, found.high):
        enough = needed(found, bound)
        assert enough is not None
        high = [unchanged(n, Sampling(confidence)).high or 1 for n in (enough - 1, enough, enough + 1) if n]
        assert high[-1] <= bound * (1 + 1e-9) and high[0] >= bound * (1 - 1e-9)


def test_degenerate_intervals() -> None:
    assert interval([0.3] * 7, QUICK) == (0.3, 0.3, 0.3, 7, False)
    assert interval([2.0], QUICK) == (2.0, None, None, 1, False)
    for wrong in ([], [1.0, math.nan]):
        with pytest.raises(ValueError, match="finite values"):
            interval(wrong, QUICK)


def test_the_number_needed_grows_with_the_square_of_the_closeness() -> None:
    assert needed(Interval(0.5, 0.25, 0.75, 100), 0.625) == 400
    assert needed(Interval(0.5, 0.25, 0.75, 100), 0.4375) == 1600
    assert needed(Interval(0.5, 0.3, 0.7, 100), 0.5) is None
    assert needed(Interval(0.5, None, None, 1), 0.6) is None


def noisy(examples: int, excess: float, noise: float, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """(state, parent): the log of the perplexity ratio is `excess`, with `noise` from window to window."""
    generator = random.Random(seed)
    parent = Measurement(TOKENS, top1=[TOKENS] * examples, kl=[0.0] * examples)
    state = Measurement(TOKENS, top1=[TOKENS - 5] * examples)
    for _ in range(examples):
        own = generator.gauss(3.0, 0.5)  # what is hard for both is far larger, and cancels
        parent.nll.append(TOKENS * own)
        state.nll.append(TOKENS * (own + excess + generator.gauss(0, noise)))
        state.kl.append(TOKENS * 0.02 * generator.expovariate(1.0))
    return state.as_dict(), parent.as_dict()


def measured(states: dict[str, dict[str, Any]]) -> dict[str, Any]:
    full = {name: {"baseline": None, "format": "awq", "same_as": None, "size_on_disk": 2_000_000,
                   "bits_per_weight": 4.25, "bits_per_parameter": 5.0, **state, "seconds": None}
            for name, state in states.items()}  # fmt: skip
    return {"evaluation": {"vocabulary": 1000}, "states": full}


def judged(tmp_path: Any, state: dict[str, Any], parent: dict[str, Any], **gate: Any) -> dict[str, Any]:
    exports = [Exported("x", tmp_path / "x", ("vllm",))]
    found = measured({"parent": parent, "x": state})
    return verdict(tmp_path / "verdict.json", found, exports, {}, gate)["exports"]["x"]


def two_sigma(examples: int, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """(state, parent) whose mean difference is, to the last digit, two standard errors of 100 examples."""
    state, parent = noisy(examples, 0.0, 0.1, seed)
    pairs = list(zip(state["windows"]["nll"], parent["windows"]["nll"], strict=True))
    noise = [(a - b) / TOKENS for a, b in pairs]
    mean, spread = standard.fmean(noise), standard.stdev(noise)
    exact = [0.1 * (value - mean) / spread + 2 * 0.1 / math.sqrt(100) for value in noise]
    state["windows"]["nll"] = [b + TOKENS * more for (_, b), more in zip(pairs, exact, strict=True)]
    return state, parent


def test_a_two_sigma_difference_is_inconclusive_at_100_examples_and_decided_at_enough(tmp_path: Any) -> None:
    bound = perplexity.Options(max_relative_increase=0.0)
    few = judged(tmp_path, *two_sigma(100), perplexity=bound)
    (check,) = few["checks"]
    assert few["status"] == "inconclusive" and check["outcome"] == "undecided" and not few["released"]
    # 2.626 is the 99.5% quantile of Student's t of 99 degrees of freedom, here of the log of the ratio judged
    assert (2.6 / 2) ** 2 * 100 <= check["needed"] < 260 and f"about {check['needed']} would" in check["text"]
    many = judged(tmp_path, *two_sigma(round(1.2 * check["needed"]), seed=1), perplexity=bound)
    assert many["status"] == "refused" and many["checks"][0]["outcome"] == "failed"
    state, parent = two_sigma(round(1.2 * check["needed"]), seed=1)
    better = judged(tmp_path, parent | {"kl": 0.0}, state, perplexity=bound)  # the other way round
    assert better["status"] == "released"


def test_the_number_said_to_be_needed_decides_about_as_often_as_not() -> None:
    """Of repeated trials at the number that 100 examples asked for, between a quarter and all are decided."""
    options = perplexity.Options(max_relative_increase=0.0)
    decided = 0
    for seed in range(40):
        state, parent = noisy(100, 0.01, 0.1, seed)
        (first,) = perplexity.judge(state, parent, options, QUICK)
        if first.outcome != "undecided" or first.needed is None or first.needed > 20_000:
            decided += first.outcome != "undecided"
            continue
        (second,) = perplexity.judge(*noisy(first.needed, 0.01, 0.1, seed + 1000), options, QUICK)
        decided += second.outcome != "undecided"
    assert 10 <= decided <= 40


def test_pairing_removes_what_is_hard_for_both() -> None:
    state, parent = noisy(100, 0.02, 0.02)
    paired = _paired.perplexity_increase(state, parent, QUICK)
    apart = interval([v / TOKENS for v in state["windows"]["nll"]], QUICK)
    assert paired and paired.low is not None and paired.high is not None and paired.low > 0
    assert apart.low is not None and apart.high is not None
    assert apart.high - apart.low > 10 * (paired.high - paired.low)


def test_one_window_decides_nothing(tmp_path: Any) -> None:
    found = judged(tmp_path, *noisy(1, 0.0, 0.0), divergence=divergence.Options(max_kl=10))
    assert found["status"] == "inconclusive" and "too few windows" in found["checks"][0]["text"]


def test_what_is_too_good_is_anomalous(tmp_path: Any) -> None:
    state, parent = noisy(200, -0.2, 0.05)
    found = judged(tmp_path, state, parent, divergence=divergence.Options(max_kl=1e-9))
    assert found["status"] == "anomalous" and not found["released"] and found["checks"] == []
    assert "below the parent's" in found["anomalies"][0]
    loose = statistics.Options(max_gain=0.5)
    assert judged(tmp_path, state, parent, statistics=loose)["status"] == "released"
    few = noisy(3, -0.2, 2.0)  # nothing is known from three windows
    assert judged(tmp_path, *few)["status"] == "released"


def test_different_counts_are_anomalous(tmp_path: Any) -> None:
    state, _ = noisy(20, 0.0, 0.1)
    _, parent = noisy(21, 0.0, 0.1)
    found = judged(tmp_path, state, parent, perplexity=perplexity.Options(max_relative_increase=1))
    assert found["status"] == "anomalous" and "20 windows of 1000 tokens" in found["anomalies"][0]


def test_a_parent_that_does_not_know_the_text_is_anomalous(tmp_path: Any) -> None:
    state, parent = noisy(20, 0.0, 0.1)
    for one in (state, parent):
        one["perplexity"] *= 100
    found = judged(tmp_path, state, parent)
    assert found["status"] == "anomalous" and "above 1000" in found["anomalies"][0]
    allowed = statistics.Options(max_parent_perplexity=1e6)
    assert judged(tmp_path, state, parent, statistics=allowed)["status"] == "released"


def test_sizes_are_exact(tmp_path: Any) -> None:
    state, parent = noisy(20, 0.0, 0.1)
    fits = size.Options(max_bits_per_weight=4.25, max_mb=2)
    assert judged(tmp_path, state, parent, size=fits)["status"] == "released"
    found = judged(tmp_path, state, parent, size=size.Options(max_bits_per_weight=4.2, max_mb=1.9))
    assert [check["outcome"] for check in found["checks"]] == ["failed", "failed"]
    assert found["checks"][0]["text"] == "4.250 bits per weight; at most 4.2"


def test_the_worst_export_names_the_verdict_and_each_has_its_own_bounds(tmp_path: Any) -> None:
    state, parent = noisy(50, 0.01, 0.01)
    strict = {"divergence": divergence.Options(max_kl=1e-6)}
    exports = [Exported("loose", tmp_path / "a", ()), Exported("strict", tmp_path / "b", (), gate=strict)]
    found = verdict(
        tmp_path / "verdict.json",
        measured({"parent": parent, "loose": state, "strict": state}),
        exports,
        {},
        {"divergence": divergence.Options(max_kl=1)},
    )
    assert {name: e["status"] for name, e in found["exports"].items()} == {"loose": "released", "strict": "refused"}
    assert found["status"] == "refused"


def test_one_token_that_differs_decides_a_bound_that_allows_none(tmp_path: Any) -> None:
    """However few the windows, and though Student's t would reach below a KL of 0 and above an agreement of 1."""
    parent = Measurement(TOKENS, nll=[100.0] * 4, kl=[0.0] * 4, top1=[TOKENS] * 4).as_dict()
    once = Measurement(TOKENS, nll=[100.0] * 4, kl=[0.0, 0.0, 0.0, 0.5], top1=[TOKENS] * 3 + [TOKENS - 1]).as_dict()
    none = divergence.Options(max_kl=0, min_top1=1)
    assert [c["outcome"] for c in judged(tmp_path, once, parent, divergence=none)["checks"]] == ["failed", "failed"]
    assert [c["outcome"] for c in judged(tmp_path, parent, parent, divergence=none)["checks"]] == ["passed", "passed"]
    some = divergence.Options(max_kl=0.001, min_top1=0.999)
    assert {c["outcome"] for c in judged(tmp_path, once, parent, divergence=some)["checks"]} == {"undecided"}
