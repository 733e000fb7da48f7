"""Run the parent and candidates over the same windows of held-out text and compare their next-token distributions.

For a window of T tokens the T - 1 positions whose next token is known count, with p the parent's and q the candidate's
distribution over the whole vocabulary:

    nll = -log q[next token]    perplexity = exp(mean nll)
    KL(p || q) = sum_v p[v] (log p[v] - log q[v])    top-1 agreement: the most likely token is the same

Logits are float32, sums float64. Memory, whatever the number of windows and candidates and however large the
vocabulary: the last hidden states of one wave of windows of the parent and of one candidate (each at most `WAVE_BYTES`,
in the compute dtype), one decoder block, two heads, and the logits of `LOGIT_BYTES`, to which the heads are applied a
few positions at a time. Every block is read once per wave. With a `store` the parent's last hidden states stay on disk
(num_windows x length x hidden size in the compute dtype: 0.35 GB for 300 x 1,024 x 576 in bfloat16), and what is
measured later needs no pass of the parent.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from qat import manifest
from qat.artifact import is_whole, save_whole
from qat.model import WAVE_BYTES, Model, Share

VERSION = 2  # raised when the numbers change
LOGIT_BYTES = 256 * 2**20  # float32 logits, and what is computed from them, alive at once
LIVE = 6  # tensors of the size of one model's logits alive at once
STORE_BYTES = 4 * 2**30  # hidden states of the parent kept on disk for one text; larger ones are computed again
WORST, CONTEXT, TOP = 8, 48, 5  # positions kept to look at; tokens before one; most likely tokens there
EDGES = torch.logspace(-7, 2, 46, dtype=torch.float64)  # five bins a decade of the KL of one token
QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)
Progress = Callable[[str, int, int], None]  # (state, windows done, windows)


@dataclass
class Measurement:
    """Sums over the predicted tokens of each window, in the order of the windows, kept for paired statistics.

    token_kl: float32, the KL of every token, a window after the other. worst: the position with the largest KL of each
    window: {window, position, kl, nll, parent_nll, context, next, top, parent_top}, with token ids; `top` lists
    [id, probability].
    """

    tokens_per_window: int
    nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    top1: list[int] = field(default_factory=list)
    token_kl: list[Tensor] = field(default_factory=list)
    worst: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        return self.tokens_per_window * len(self.nll)

    @property
    def mean_nll(self) -> float:
        return math.fsum(self.nll) / self.num_tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.mean_nll) if self.mean_nll < 700 else math.inf

    @property
    def mean_kl(self) -> float:
        """Nats per token; exactly 0 for a bit-identical copy."""
        return math.fsum(self.kl) / self.num_tokens

    @property
    def kl_stderr(self) -> float | None:
        """Standard error of `mean_kl`, windows taken as independent; None for fewer than two."""
        if len(self.kl) < 2:
            return None
        means = [value / self.tokens_per_window for value in self.kl]
        return statistics.stdev(means) / math.sqrt(len(means)) if all(map(math.isfinite, means)) else math.nan

    @property
    def agreement(self) -> float:
        return sum(self.top1) / self.num_tokens

    def as_dict(self) -> dict[str, Any]:
        """For JSON; what is not finite becomes None."""
        return {
            "perplexity": _finite(self.perplexity),
            "nll": _finite(self.mean_nll),
            "kl": _finite(self.mean_kl),
            "kl_stderr": _finite(self.kl_stderr),
            "top1": self.agreement,
            "num_tokens": self.num_tokens,
            "seconds": round(self.seconds, 3),
            "windows": {"nll": [_finite(v) for v in self.nll], "kl": [_finite(v) for v in self.kl], "top1": self.top1},
            "token_kl": self._spread(),
            "worst": sorted(self.worst, key=lambda one: -one["kl"])[:WORST],
        }

    def _spread(self) -> dict[str, Any] | None:
        """Quantiles of the KL of single tokens, and counts between `edges`, those below and above at the ends."""
        values = torch.cat(self.token_kl).double() if self.token_kl else torch.empty(0)
        if not len(values) or not values.isfinite().all():
            return None
        counts = torch.bincount(torch.bucketize(values, EDGES), minlength=len(EDGES) + 1)
        ordered = values.sort().values
        places = [min(len(ordered) - 1, math.ceil(q * len(ordered)) - 1) for q in QUANTILES]
        quantiles = {str(q): ordered[place].item() for q, place in zip(QUANTILES, places, strict=True)}
        return {"quantiles": quantiles, "edges": EDGES.tolist(), "counts": counts.tolist()}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def measure(
    parent: Model, candidate: Model | None, windows: Tensor, progress: Progress | None = None, batch: int = 8
) -> Measurement:
    """Compare one candidate with the parent; None measures the parent itself (KL 0, agreement 1).

    windows: token ids (num_windows, length). Example: `measure(parent, Model(export.config, export), ids).perplexity`.
    """
    candidates = {} if candidate is None else {"candidate": candidate}
    own, others = measure_many(parent, candidates, windows, progress, batch)
    return own if candidate is None else others["candidate"]


@torch.no_grad()
def measure_many(
    parent: Model,
    candidates: Mapping[str, Model],
    windows: Tensor,
    progress: Progress | None = None,
    batch: int = 8,
    store: Path | None = None,
) -> tuple[Measurement, dict[str, Measurement]]:
    """The parent's measurement and, by name, those of several candidates, from one pass of the parent.

    store: a folder for the parent's last hidden states, for this parent, text and dtype alone. Raises ValueError for
    windows that cannot be measured and for a parent whose logits are not finite.
    """
    _check_windows(parent, windows)
    for name, candidate in candidates.items():
        ours, theirs = parent.config.vocab_size, candidate.config.vocab_size
        if ours != theirs:
            raise ValueError(f"{name} has a vocabulary of {theirs}, the parent of {ours}; they cannot be compared")
    own = Measurement(windows.shape[1] - 1)
    others = {name: Measurement(windows.shape[1] - 1) for name in candidates}
    one = windows.shape[1] * parent.config.hidden_size * torch.finfo(parent.dtype).bits // 8
    per_wave = max(1, WAVE_BYTES // one)  # as Model.hidden does, so that one call is one wave
    if one * len(windows) > STORE_BYTES:
        store = None
    for number, wave in enumerate(windows.split(per_wave)):
        start = time.perf_counter()
        file = store / f"{number:05d}.safetensors" if store else None
        reference = _parent_states(parent, wave, batch, file, _within(progress, "parent", own, wave, windows))
        _compare(parent, parent, reference, reference, wave, own)
        own.seconds += time.perf_counter() - start
        if not all(map(math.isfinite, own.nll)):
            raise ValueError("the parent's logits are not finite on the evaluation text; nothing compares with that")
        _report(progress, "parent", own, windows)
        for name, candidate in candidates.items():
            start = time.perf_counter()
            states = list(candidate.hidden(wave, batch, _within(progress, name, others[name], wave, windows)))
            _compare(parent, candidate, reference, states, wave, others[name])
            others[name].seconds += time.perf_counter() - start
            _report(progress, name, others[name], windows)
    return own, others


def _parent_states(parent: Model, wave: Tensor, batch: int, file: Path | None, progress: Share) -> list[Tensor]:
    """The parent's last hidden states (1, length, hidden) of each window of a wave, from `file` when it is there."""
    if file is not None and is_whole(file):
        return list(load_file(file, device=str(parent.device))["hidden"].split(1))
    states = list(parent.hidden(wave, batch, progress))
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with manifest.whole(file) as part:
            save_whole({"hidden": torch.cat(states).cpu()}, part)
    return states


def _report(progress: Progress | None, name: str, measurement: Measurement, windows: Tensor) -> None:
    if progress:
        progress(name, len(measurement.nll), len(windows))


def _within(progress: Progress | None, name: str, measurement: Measurement, wave: Tensor, windows: Tensor) -> Share:
    """Reports part of a wave that has been through part of the blocks as some of its windows, all but the last."""

    def told(share: float) -> None:
        if progress:
            progress(name, len(measurement.nll) + int(share * (len(wave) - 1)), len(windows))

    return told


def _check_windows(parent: Model, windows: Tensor) -> None:
    if windows.ndim != 2 or windows.shape[0] < 1 or windows.shape[1] < 2:
        raise ValueError(f"evaluation windows have shape {tuple(windows.shape)}; (num_windows, length >= 2) is needed")
    low, high, vocabulary = int(windows.min()), int(windows.max()), parent.config.vocab_size
    if low < 0 or high >= vocabulary:
        raise ValueError(f"token ids {low}..{high} leave the vocabulary of {vocabulary}; use the parent's tokenizer")


def _compare(
    parent: Model, candidate: Model, ours: list[Tensor], theirs: list[Tensor], ids: Tensor, into: Measurement
) -> None:
    """Add the sums of each window. ours, theirs: last hidden states (1, length, hidden) of parent and candidate."""
    chunk = max(16, LOGIT_BYTES // (4 * parent.config.vocab_size * LIVE))
    with parent.ends(), candidate.ends():
        for p_hidden, q_hidden, window in zip(ours, theirs, ids, strict=True):
            nll = kl = 0.0
            agree, tokens, worst = 0, list[Tensor](), dict[str, Any]()
            parts = (p_hidden[0, :-1].split(chunk), q_hidden[0, :-1].split(chunk), window[1:].split(chunk))
            for start, p_part, q_part, target in zip(range(0, len(window) - 1, chunk), *parts, strict=True):
                q = candidate.logits(q_part).log_softmax(-1)
                q_nll = -q.gather(1, target.to(q.device)[:, None])[:, 0]
                nll += q_nll.double().sum().item()
                if candidate is parent:
                    agree += len(target)
                    continue
                p = parent.logits(p_part.to(parent.device)).log_softmax(-1).to(q.device)
                each = (p.exp() * (p - q)).sum(-1)
                kl += each.double().sum().item()
                agree += int((p.argmax(-1) == q.argmax(-1)).sum())
                tokens.append(each.cpu())
                at = int(each.argmax())
                if each[at].item() > worst.get("kl", -math.inf):
                    found = {"kl": each[at].item(), "nll": q_nll[at].item(), "parent_nll": -p[at, target[at]].item()}
                    tops = {"top": _top(q[at]), "parent_top": _top(p[at])}
                    worst = {"window": len(into.nll), "position": start + at, **found, **tops}
            if worst and all(math.isfinite(worst[key]) for key in ("kl", "nll", "parent_nll")):
                place = worst["position"] + 1
                context = {"context": window[max(0, place - CONTEXT) : place].tolist(), "next": int(window[place])}
                into.worst.append(worst | context)
            into.nll.append(nll)
            into.kl.append(kl)
            into.top1.append(agree)
            into.token_kl += tokens


def _top(log_probabilities: Tensor) -> list[list[float]]:
    """[id, probability] of the most likely tokens."""
    found = log_probabilities.topk(min(TOP, len(log_probabilities)))
    return [[int(i), p] for p, i in zip(found.values.exp().tolist(), found.indices.tolist(), strict=True)]
