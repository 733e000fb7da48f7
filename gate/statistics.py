"""How sure a verdict must be, and what is too good or too strange to be believed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from gate import _paired
from gate._bootstrap import Sampling
from qat.scheme import Section

VERSION = 1


class Options(Section):
    """confidence: of the intervals that a bound must lie outside of. resamples, seed: of the bootstrap.

    max_gain: a perplexity lower than the parent's by more than this share, or a task better by more than this share of
    its examples, is anomalous. max_parent_perplexity: of the parent itself; null takes its vocabulary, which is what a
    model that knows nothing has.
    """

    confidence: float = Field(0.99, gt=0.5, lt=1)
    resamples: int = Field(10_000, ge=1000)
    seed: int = Field(0, ge=0)
    max_gain: float = Field(0.05, ge=0)
    max_parent_perplexity: float | None = Field(None, gt=1)


def anomalies(
    measured: dict[str, Any], parent: dict[str, Any], vocabulary: int, options: Options, sampling: Sampling
) -> Iterator[str]:
    """Why the numbers of one state cannot be believed, in sentences. measured, parent: of the same examples."""
    limit = options.max_parent_perplexity or vocabulary
    if parent["perplexity"] is None or parent["perplexity"] > limit:
        own = "not finite" if parent["perplexity"] is None else f"{parent['perplexity']:.4g}"
        yield (
            f"the parent's own perplexity is {own}, above {limit:g}: it does not know this text; look at the "
            "tokenizer, the text and the weights, or set gate.statistics.max_parent_perplexity"
        )
    counts = [(len(m["windows"]["nll"]), m["num_tokens"]) for m in (measured, parent)]
    if counts[0] != counts[1]:
        yield f"measured on {_text(*counts[0])}, the parent on {_text(*counts[1])}: the two cannot be compared"
        return
    increase = _paired.perplexity_increase(measured, parent, sampling)
    if increase and increase.high is not None and increase.high < -options.max_gain:
        yield (
            f"perplexity is {-increase.value:.2%} below the parent's (at least {-increase.high:.2%}); a compressed "
            "model is not that much better: look for evaluation text in its training, or a wrong parent"
        )
    for name, task in measured.get("tasks", {}).items():
        ours, theirs = len(task["scores"]), len(parent["tasks"][name]["scores"])
        if ours != theirs:
            yield f"{name} was answered for {ours} examples, by the parent for {theirs}: the two cannot be compared"
            continue
        gain = _paired.gain(name, measured, parent, sampling)
        if gain.low is not None and gain.low > options.max_gain:
            yield (
                f"{name} is {gain.value:.2%} better than the parent (at least {gain.low:.2%}); a compressed model is "
                "not that much better: look for its examples in the training text"
            )


def _text(windows: int, tokens: int) -> str:
    return f"{windows} windows of {tokens} tokens in all"
