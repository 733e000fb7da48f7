"""Offline tasks: the reader of JSONL examples, and those scored by log-likelihood, block by block, one in memory.

Sequences are padded on the right to a multiple of `PAD` tokens: a causal model does not see what comes after.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gate import _generate
from gate._generate import Prompt
from qat.model import WAVE_BYTES, Model, Share

VERSION = 2
PAD, BATCH = 16, 8
CHOICE, CONTINUATION = {"context", "choices", "answer"}, {"context", "continuation"}


@dataclass(frozen=True)
class Request:
    """Token ids, of which the last `count` are scored; letters: the length of the text that they stand for."""

    ids: tuple[int, ...]
    count: int
    letters: int


@dataclass(frozen=True)
class Example:
    """One question: a request for each choice and the right one's place, or one request and None."""

    requests: tuple[Request, ...]
    answer: int | None

    @property
    def metric(self) -> str:
        return "acc" if self.answer is None else "acc_norm"

    @property
    def num_requests(self) -> int:
        return len(self.requests)


def read(path: Path, tokenizer: Any, limit: int | None, longest: int | None) -> list[Example] | list[Prompt]:
    """The examples of a JSONL file as tokens; see gate/tasks.py. Raises ValueError that names file and line."""
    found: list[Any] = []
    with path.open("rb") as f:
        for number, line in enumerate(f, 1):
            if limit is not None and len(found) >= limit:
                break
            if line.strip():
                try:
                    found.append(_example(json.loads(line.decode()), tokenizer, longest))
                except (ValueError, RecursionError) as error:  # the latter: brackets without end
                    raise ValueError(f"{path} line {number}: {error}") from error
    if not found:
        raise ValueError(f"{path} holds no example; one a line is needed, such as {{'context': ..., 'choices': ...}}")
    kinds = sorted({example.metric for example in found})
    if len(kinds) > 1:
        raise ValueError(f"{path} mixes examples scored by {' and '.join(kinds)}; give each kind as a task of its own")
    return found


def _example(row: Any, tokenizer: Any, longest: int | None) -> Example | Prompt:
    keys = set(row) if isinstance(row, dict) else set()
    for text in strings(row):
        text.encode()  # half of a surrogate pair is no text: ValueError
    if "prompt" in keys:
        return _generate.prompt(row, tokenizer, longest)
    if not (keys >= CHOICE or keys >= CONTINUATION) or not isinstance(row["context"], str):
        need = f"{sorted(CHOICE)}, {sorted(CONTINUATION)} or {sorted(_generate.NEEDED)}"
        raise ValueError(f"an example has the keys {need} with a text as context, got {sorted(keys) or row!r}")
    answer = row["answer"] if "choices" in row else None
    texts = row["choices"] if "choices" in row else [row["continuation"]]
    if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError(f"choices and continuation are texts with at least one letter, got {texts!r}")
    if "choices" in row and (len(texts) < 2 or type(answer) is not int or not 0 <= answer < len(texts)):
        raise ValueError(f"answer is the place of one of two or more choices, from 0, got {answer!r} of {len(texts)}")
    return Example(tuple(_request(row["context"], text, tokenizer, longest) for text in texts), answer)


def _request(context: str, text: str, tokenizer: Any, longest: int | None) -> Request:
    """Spaces that end the context go with what follows, as tokenizers have them."""
    letters = len(text)
    head = context.rstrip(" ")
    text = context[len(head) :] + text

    def encode(of: str) -> list[int]:
        return list(tokenizer(of, add_special_tokens=False, verbose=False)["input_ids"])

    before = encode(head)
    ids = encode(head + text)
    if not before:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if start is None:
            raise ValueError("an empty context needs a tokenizer with a beginning-of-text or end-of-text token")
        before, ids = [start], [start, *ids]
    count = len(ids) - len(before)
    if count < 1:
        raise ValueError(f"{text!r} adds no token to its context: move a word from the context into it")
    if longest is not None and len(ids) > longest:
        raise ValueError(f"{len(ids)} tokens are more than the model reads ({longest}); shorten the context")
    return Request(tuple(ids), count, letters)


def strings(value: Any) -> Iterator[str]:
    """Every text in a JSON value, in order; keys are none."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings(inner)


def score(model: Model, examples: Sequence[Example], advance: Callable[[int], Any] = lambda done: None) -> list[float]:
    """1 for every example that the model gets right, else 0. advance: told how many requests were done."""
    flat = [request for example in examples for request in example.requests]
    results = dict[int, tuple[float, bool]]()
    order = sorted(range(len(flat)), key=lambda n: -len(flat[n].ids))
    for wave in _waves(model, flat, order):
        _run(model, flat, wave, results, _parts(advance, sum(map(len, wave))))
    ordered = iter(results[n] for n in range(len(flat)))
    return [_judge(example, [next(ordered) for _ in example.requests]) for example in examples]


def _parts(advance: Callable[[int], Any], count: int) -> Share:
    """Tells of a part of the blocks as of so many of `count` requests."""
    told = 0

    def within(share: float) -> None:
        nonlocal told
        advance(int(share * count) - told)
        told = int(share * count)

    return within


def _judge(example: Example, results: Sequence[tuple[float, bool]]) -> float:
    """A model that gives no number for a choice has not chosen: NaN compares with nothing, and the first would win."""
    if example.answer is None:
        return float(results[0][1])
    rates = [logp / request.letters for (logp, _), request in zip(results, example.requests, strict=True)]
    is_number = not any(map(math.isnan, rates))
    return float(is_number and max(range(len(rates)), key=rates.__getitem__) == example.answer)


def _waves(model: Model, flat: Sequence[Request], order: Sequence[int]) -> Iterator[list[list[int]]]:
    """Batches of requests of about equal length, as many at once as their hidden states have room for."""
    wave, taken = list[list[int]](), 0
    for start in range(0, len(order), BATCH):
        batch = list(order[start : start + BATCH])
        size = len(batch) * _padded(flat, batch) * model.config.hidden_size * model.dtype.itemsize
        if wave and taken + size > WAVE_BYTES:
            yield wave
            wave, taken = [], 0
        wave.append(batch)
        taken += size
    yield wave


def _padded(flat: Sequence[Request], batch: Sequence[int]) -> int:
    return -(-max(len(flat[n].ids) for n in batch) // PAD) * PAD


@torch.no_grad()
def _run(
    model: Model,
    flat: Sequence[Request],
    wave: Sequence[Sequence[int]],
    results: dict[int, tuple[float, bool]],
    progress: Share,
) -> None:
    with model.ends():
        states = []
        for batch in wave:
            ids = torch.zeros(len(batch), _padded(flat, batch), dtype=torch.int64)
            for row, n in enumerate(batch):
                ids[row, : len(flat[n].ids)] = torch.tensor(flat[n].ids)
            states.append(model.embed(ids))
    states = model.through(states, progress)
    with model.ends():
        for batch, state in zip(wave, states, strict=True):
            for row, n in enumerate(batch):
                results[n] = _likelihood(model, state[row], flat[n])


def _likelihood(model: Model, hidden: Tensor, request: Request) -> tuple[float, bool]:
    """(log-likelihood of the scored tokens, whether each is the most likely one). hidden: (length, hidden size)."""
    end = len(request.ids)
    logp = model.logits(hidden[end - request.count - 1 : end - 1]).log_softmax(-1)
    target = torch.tensor(request.ids[end - request.count :], device=logp.device)
    total = logp.gather(1, target[:, None]).double().sum().item()
    return total, bool((logp.argmax(-1) == target).all())
