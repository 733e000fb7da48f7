"""Tasks of every state, remembered by content."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from functools import cache as once
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gate import _examples, _generate, _lm_eval
from gate._generate import Prompt
from gate.stage._content import digest, remember, remembered
from qat.model import Model

Progress = Callable[[str, int], Any]  # (state, requests done just now)


def measure(
    models: Mapping[str, Callable[[bool], Model]],
    content: Mapping[str, str],
    offline: Mapping[str, Sequence[Any]],
    lm_eval: Sequence[str],
    limit: int | None,
    tokenizer: Any,
    ends: Sequence[int],
    cache: Path,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Progress,
) -> dict[str, dict[str, dict[str, Any]]]:
    """State -> task -> {metric, score, scores}, a score for every example.

    models: by state, makes its model (resident when told so). content: fingerprints of the states. offline: examples
    (`Example` or `Prompt`) by task. ends: the tokens that end a generated text. Equal content is measured once.
    """
    out = dict[str, dict[str, dict[str, Any]]]()
    where = (str(dtype), torch.device(device).type)
    for name, make in models.items():
        found, resident = dict[str, dict[str, Any]](), once(partial(make, True))
        for task, examples in offline.items():
            advance, is_text = partial(progress, name), isinstance(examples[0], Prompt)
            kind = ("generation", _generate.VERSION, ends) if is_text else ("offline", _examples.VERSION)
            key = digest(*kind, content[name], [astuple(example) for example in examples], *where)
            known = remembered(cache, "task", key)
            if known is None:
                if is_text:
                    scores = _generate.score(resident(), examples, tokenizer, ends, advance)
                else:
                    scores = _examples.score(make(False), examples, advance)
                known = {"metric": examples[0].metric, "scores": scores}
                remember(cache, "task", key, known)
            else:
                advance(num_requests(examples))
            found[task] = known
        if lm_eval:
            key = digest("lm-eval", _lm_eval.VERSION, _lm_eval.version(), content[name], sorted(lm_eval), limit, *where)
            known = remembered(cache, "task", key)
            if known is None:
                known = _lm_eval.score(resident(), tokenizer, lm_eval, limit)
                remember(cache, "task", key, known)
            found |= known
        out[name] = {
            task: {**one, "score": math.fsum(one["scores"]) / len(one["scores"])} for task, one in found.items()
        }
    return out


def num_requests(examples: Sequence[Any]) -> int:
    """What the progress of a task counts."""
    return sum(example.num_requests for example in examples)


def texts(offline: Mapping[str, str], lm_eval: Sequence[str]) -> dict[str, Iterator[str]]:
    """What the examples of tasks say, by the key of the recipe: all texts of each, one after the other."""
    found = {f"gate.tasks.offline.{name}": _lines(Path(path)) for name, path in offline.items()}
    return found | ({"gate.tasks.lm_eval": _lm_eval.texts(lm_eval)} if lm_eval else {})


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            try:
                yield " ".join(_examples.strings(json.loads(line) if line.strip() else None))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path} line {number} is not JSON: {error}") from error
