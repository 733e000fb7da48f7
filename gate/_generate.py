"""Offline generation tasks: greedy decoding by transformers' own `generate`, the whole model in memory.

Prompts of about equal length go together, padded on the left. Nothing but length and stop texts ends a text early: no
sampling, no penalties, whatever the generation_config.json of a directory asks for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from qat.model import Model

VERSION = 1
BATCH, MAX_TOKENS = 8, 64
KEYS, NEEDED = {"prompt", "answer", "max_tokens", "stop", "match"}, {"prompt", "answer"}
NUMBER = re.compile(r"(?<!\d)[-+]?(?:\d[\d,]*)?\.?\d+")


@dataclass(frozen=True)
class Prompt:
    """One prompt as token ids, what answers it, and how that is seen."""

    ids: tuple[int, ...]
    answers: tuple[str, ...]
    match: str
    max_tokens: int
    stop: tuple[str, ...]

    @property
    def metric(self) -> str:
        return self.match

    @property
    def num_requests(self) -> int:
        return 1


def exact_match(text: str, answer: str) -> bool:
    """The text is the answer, spaces around both aside."""
    return text.strip() == answer.strip()


def contains(text: str, answer: str) -> bool:
    """The answer stands somewhere in the text."""
    return answer.strip() in text


def numeric(text: str, answer: str) -> bool:
    """The last number in the text is the answer; commas between digits are left out."""
    found = [_number(one) for one in NUMBER.findall(text)]
    return bool(found) and found[-1] == _number(answer.strip())


MATCHES: dict[str, Callable[[str, str], bool]] = {one.__name__: one for one in (exact_match, contains, numeric)}


def _number(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))


def prompt(row: dict[str, Any], tokenizer: Any, longest: int | None) -> Prompt:
    """A row of a file with `prompt`; see gate/tasks.py. Raises ValueError."""
    if not NEEDED <= row.keys() <= KEYS or not isinstance(row["prompt"], str):
        raise ValueError(
            f"a prompt is a text and goes with {sorted(KEYS - {'prompt'})}, of which answer must be there; "
            f"got {sorted(row)}"
        )
    answers, stop = (_texts(key, row.get(key, [])) for key in ("answer", "stop"))
    match, most = row.get("match", "exact_match"), row.get("max_tokens", MAX_TOKENS)
    if not answers:
        raise ValueError("answer is a text or a list of texts, of which one must be met; got none")
    if not isinstance(match, str) or match not in MATCHES:
        raise ValueError(f"match is one of {', '.join(MATCHES)}, got {match!r}")
    if match == "numeric" and (wrong := [one for one in answers if not NUMBER.fullmatch(one.strip())]):
        raise ValueError(f"an answer to match as numeric is a number, got {wrong[0]!r}")
    if type(most) is not int or most < 1:
        raise ValueError(f"max_tokens is a whole number from 1, got {most!r}")
    ids = tuple(tokenizer(row["prompt"], add_special_tokens=False, verbose=False)["input_ids"])
    if not ids:
        raise ValueError("the prompt has no token; write at least one word")
    if longest is not None and len(ids) + most > longest:
        raise ValueError(
            f"{len(ids)} tokens and max_tokens {most} are more than the model reads ({longest}); shorten the prompt"
        )
    return Prompt(ids, answers, match, most, stop)


def _texts(key: str, value: Any) -> tuple[str, ...]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
        raise ValueError(f"{key} is a text or a list of texts, none of them empty; got {value!r}")
    return tuple(found)


def ends(folder: Path, config: Any, tokenizer: Any) -> list[int]:
    """The tokens that end a text, as a model's config.json, generation_config.json and tokenizer name them."""
    named = [config.eos_token_id, tokenizer.eos_token_id]
    if (folder / "generation_config.json").is_file():
        named.append(GenerationConfig.from_pretrained(folder).eos_token_id)
    lists = [one if isinstance(one, list) else [one] for one in named if one is not None]
    return sorted({int(token) for one in lists for token in one})


def right(prompt: Prompt, text: str) -> float:
    """1 when what was generated, cut off before the first stop text, meets one of the answers, else 0."""
    text = cut(text, prompt.stop)
    return float(any(MATCHES[prompt.match](text, answer) for answer in prompt.answers))


def cut(text: str, stop: Sequence[str]) -> str:
    """The text before the first of the stop texts."""
    return text[: min((at for one in stop if (at := text.find(one)) >= 0), default=len(text))]


def score(
    model: Model,
    prompts: Sequence[Prompt],
    tokenizer: Any,
    ends: Sequence[int],
    advance: Callable[[int], Any] = lambda done: None,
) -> list[float]:
    """1 for every prompt that the model answers right, else 0. See `texts`."""
    said = texts(model, prompts, tokenizer, ends, advance)
    return [right(prompt, text) for prompt, text in zip(prompts, said, strict=True)]


@torch.no_grad()
def texts(
    model: Model,
    prompts: Sequence[Prompt],
    tokenizer: Any,
    ends: Sequence[int],
    advance: Callable[[int], Any] = lambda done: None,
) -> list[str]:
    """What the model says after each prompt, not yet cut at stop texts.

    model: resident. ends: the tokens that end a text. advance: told how many prompts were done.
    """
    assert model.resident, "generate needs every block at once"
    found, own = dict[int, str](), model.root.generation_config
    with model.ends():
        for index in range(len(model.blocks)):
            model.load_block(index)
        try:
            for batch in _batches(prompts):
                said = _generate(model, [prompts[n] for n in batch], tokenizer, ends)
                found |= zip(batch, said, strict=True)
                advance(len(batch))
        finally:
            model.root.generation_config = own
    return [found[n] for n in range(len(prompts))]


def _batches(prompts: Sequence[Prompt]) -> Iterator[list[int]]:
    """Places of prompts to run together: all with the same limits, and of about equal length."""
    kinds = dict[tuple[Any, ...], list[int]]()
    for n in sorted(range(len(prompts)), key=lambda n: -len(prompts[n].ids)):
        kinds.setdefault((prompts[n].max_tokens, prompts[n].stop), []).append(n)
    for places in kinds.values():
        yield from (places[start : start + BATCH] for start in range(0, len(places), BATCH))


def _generate(model: Model, prompts: Sequence[Prompt], tokenizer: Any, ends: Sequence[int]) -> list[str]:
    width, first = max(len(one.ids) for one in prompts), prompts[0]
    pad = ends[0] if ends else 0  # which one is all the same: it is masked
    ids, mask = (torch.full((len(prompts), width), value, dtype=torch.int64) for value in (pad, 0))
    for row, one in enumerate(prompts):
        ids[row, width - len(one.ids) :] = torch.tensor(one.ids)
        mask[row, width - len(one.ids) :] = 1
    how = GenerationConfig(
        do_sample=False, max_new_tokens=first.max_tokens, eos_token_id=list(ends) or None, pad_token_id=pad
    )
    model.root.generation_config = how  # else what it lacks is taken from there
    said = model.root.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        generation_config=how,
        stopping_criteria=StoppingCriteriaList([_Stop(first.stop, tokenizer, width)]),
    )
    return [_decode(tokenizer, row[width:], ends) for row in said.cpu()]


def _decode(tokenizer: Any, ids: Tensor, ends: Sequence[int]) -> str:
    """The text up to the token that ends it; after that, a row that is done is padded."""
    kept = ids.tolist()
    kept = kept[: next((at for at, token in enumerate(kept) if token in ends), len(kept))]
    return str(tokenizer.decode(kept, skip_special_tokens=True))


class _Stop(StoppingCriteria):
    """Ends a row once what it says after the prompt holds a stop text."""

    def __init__(self, stop: Sequence[str], tokenizer: Any, width: int) -> None:
        self.stop, self.tokenizer, self.width = stop, tokenizer, width

    def __call__(self, ids: Any, scores: Any, **_: Any) -> Any:
        texts = self.tokenizer.batch_decode(ids[:, self.width :], skip_special_tokens=True) if self.stop else []
        done = [any(one in text for one in self.stop) for text in texts] or [False] * len(ids)
        return torch.tensor(done, device=ids.device)
