"""Text to token windows: tokenized piece by piece, cut into windows of equal length, deterministic."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qat.report import plural
from qat.sections import Text
from qat.texts import PIECE, pieces


@dataclass(frozen=True)
class Corpus:
    """Token windows (num_windows, length) int64, with what identifies them.

    overlap: what was cut out because evaluation text has it too (`qat.overlap`); None when nothing was compared.
    """

    windows: Tensor
    fingerprint: str
    source: str
    overlap: dict[str, Any] | None = None

    @property
    def num_tokens(self) -> int:
        return self.windows.numel()


def tokenize(
    tokenizer: Any, text: Text, most: int | None = None, keep: Callable[[str], list[str]] | None = None
) -> Tensor:
    """The tokens of a source, int32 (num_tokens,): texts joined by the end-of-text token, no other specials.

    most: reading stops when there are so many. keep: what of a piece is to be used, each part a text by itself.
    """
    end, parts, count = tokenizer.eos_token_id, list[Tensor](), 0
    for piece, begins in pieces(text, tokenizer):
        kept = keep(piece) if keep else [piece]
        for number, part in enumerate(kept):
            ids = tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
            if parts and end is not None and (begins or number or kept != [piece]):
                ids = [end, *ids]
            parts.append(torch.tensor(ids, dtype=torch.int32))
            count += len(ids)
        if len(piece) >= PIECE // 2:
            _give_back()
        if most is not None and count >= most:
            break
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32)


def _give_back() -> None:
    """Free memory to the system: what tokenizers free stays in splinters with glibc, 20 MB for each MB of text."""
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def windows(tokenizer: Any, text: Text, length: int, sequences: int | None = None, seed: int | None = None) -> Corpus:
    """`draw` from the tokens of a text; of windows that are not drawn by a seed no more than those is read."""
    first = sequences * length if sequences is not None and seed is None else None
    return draw(tokenize(tokenizer, text, first), text, length, sequences, seed)


def draw(
    ids: Tensor,
    text: Text,
    length: int,
    sequences: int | None = None,
    seed: int | None = None,
    *,
    length_key: str = "length",
) -> Corpus:
    """Non-overlapping windows of `length` tokens from the start, or `sequences` of them drawn by `seed`, in text order.

    ids: (num_tokens,) of `text`. sequences None takes all; seed None takes the first ones. length_key: what a person
    sets to change `length`. Raises ValueError when the text is too short.
    """
    count = len(ids) // length
    wanted = sequences or count
    if count < max(wanted, 1):
        asked = "1 is" if wanted <= 1 else f"{wanted} are"
        raise ValueError(
            f"{text.source} has {plural(len(ids), 'token')}, {plural(count, 'window')} of {length}; {asked} asked for: "
            f"give more text{', fewer sequences' if wanted > 1 else ''} or a shorter {length_key} (at most "
            f"max_mb={text.max_mb:g} million characters are read)"
        )
    every = ids[: count * length].view(count, length)
    if sequences is None or seed is None:
        chosen = every[:wanted]
    else:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:wanted].sort().values
        chosen = every[order]
    chosen = chosen.long()
    return Corpus(chosen, fingerprint(chosen), text.source)


def fingerprint(ids: Tensor) -> str:
    """sha256 of the shape and the token ids: equal for equal windows, whatever file they came from.

    The same tokens in windows of another length are another text: each window begins without a past.
    """
    data = str(tuple(ids.shape)).encode() + ids.to(torch.int32).contiguous().numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


def batches(corpus: Tensor, batch: int, seed: int, step: int) -> Tensor:
    """The windows (batch, length) of one training step: a pure function of its arguments, so a resume needs no state.

    Each pass over the corpus is a new permutation; a batch may span two passes.
    """
    count, rows = len(corpus), []
    for position in range(step * batch, (step + 1) * batch):
        passed, offset = divmod(position, count)
        rows.append(_permutation(count, seed + passed)[offset])
    return corpus[torch.stack(rows)]


def _permutation(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))
