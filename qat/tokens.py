"""Text to token windows: whole file tokenized once, cut into windows of equal length, deterministic.

Sources: a .txt file, a .jsonl(.xz/.gz) or .parquet file with a text column, or a hub dataset id.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pyarrow import ArrowException
from pyarrow.parquet import ParquetFile
from torch import Tensor

OPENERS = {".xz": lzma.open, ".gz": gzip.open}


@dataclass(frozen=True)
class Corpus:
    """Token windows (num_windows, length) int64, with what identifies them."""

    windows: Tensor
    fingerprint: str
    source: str

    @property
    def num_tokens(self) -> int:
        return self.windows.numel()


def documents(source: str, split: str | None, column: str) -> Iterator[str]:
    """The texts of a source, one at a time. Raises ValueError, naming file and line, for what cannot be read."""
    path = Path(source)
    if not path.is_file():
        yield from _hub_documents(source, split, column)
        return
    kind = path.suffixes[-2] if path.suffix in OPENERS and len(path.suffixes) > 1 else path.suffix
    opener: Any = OPENERS.get(path.suffix, open)
    try:
        if kind == ".parquet":
            yield from _parquet(path, column)
        elif kind == ".jsonl":
            with opener(path, "rt", encoding="utf-8") as f:
                for number, line in enumerate(f, 1):
                    if line.strip():
                        yield _column(json.loads(line), column, f"{path} line {number}")
        elif kind == ".txt":
            with opener(path, "rt", encoding="utf-8") as f:
                yield f.read()
        else:
            raise ValueError(f"{path}: text comes from .txt, .jsonl or .parquet files (also .xz, .gz), not {kind!r}")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}; convert it first (iconv -t utf-8)") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} line {number} is not JSON: {error}") from error
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a whole {path.suffix} file: {error}; fetch it again") from error


def _parquet(path: Path, column: str) -> Iterator[str]:
    """Straight from the file, a batch of rows at a time: `datasets` would first make a copy of it in its cache."""
    try:
        file = ParquetFile(path)
    except ArrowException as error:
        raise ValueError(f"{path} is not a parquet file: {error}") from error
    only = [column] if column in file.schema_arrow.names else None  # None: the error below names the columns
    rows = (row for batch in file.iter_batches(columns=only) for row in batch.to_pylist())
    for number, row in enumerate(rows, 1):
        yield _column(row, column, f"{path} row {number}")


def _column(row: Any, column: str, where: str) -> str:
    if not isinstance(row, dict) or not isinstance(row.get(column), str):
        have = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"{where} has no text column {column!r} (found {have}); set data.<part>.column")
    try:
        row[column].encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} is no text: {error}; write the file again with whole characters") from error
    return row[column]


def _hub_documents(source: str, split: str | None, column: str) -> Iterator[str]:
    if source.startswith(("/", ".", "~")) or Path(source).suffix in {".txt", ".jsonl", ".parquet", ".xz", ".gz"}:
        what = "is a folder, not a text file" if Path(source).is_dir() else "does not exist"
        raise ValueError(f"text file {source} {what}")
    from datasets import load_dataset

    try:
        rows = load_dataset(source, split=split or "train")
    except (FileNotFoundError, ConnectionError, ValueError) as error:
        raise ValueError(
            f"dataset {source!r} is no local file and could not be loaded from the hub: {error}"
        ) from error
    for number, row in enumerate(rows):
        yield _column(row, column, f"{source} row {number}")


def tokenize(tokenizer: Any, source: str, split: str | None = None, column: str = "text") -> Tensor:
    """All tokens of a source, int64 (num_tokens,): documents joined by the end-of-text token, no other specials."""
    pieces: list[Tensor] = []
    for text in documents(source, split, column):
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if pieces and tokenizer.eos_token_id is not None:
            pieces.append(torch.tensor([tokenizer.eos_token_id]))
        pieces.append(torch.tensor(ids, dtype=torch.int64))
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)


def windows(
    tokenizer: Any,
    source: str,
    length: int,
    sequences: int | None = None,
    seed: int | None = None,
    split: str | None = None,
    column: str = "text",
) -> Corpus:
    """Non-overlapping windows of `length` tokens from the start, or `sequences` of them drawn by `seed`, in text order.

    sequences None takes all; seed None takes the first ones. Raises ValueError when the text is too short.
    """
    ids = tokenize(tokenizer, source, split, column)
    count = len(ids) // length
    wanted = sequences or count
    if count < max(wanted, 1):
        raise ValueError(
            f"{source} has {len(ids):,} tokens, {count} windows of {length}; {max(wanted, 1)} are asked for: "
            "give more text, fewer sequences or a shorter length"
        )
    every = ids[: count * length].view(count, length)
    if sequences is None or seed is None:
        chosen = every[:wanted]
    else:
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:wanted].sort().values
        chosen = every[order]
    return Corpus(chosen.contiguous(), fingerprint(chosen), source)


def fingerprint(ids: Tensor) -> str:
    """sha256 of the token ids: equal for equal data, whatever file it came from."""
    return hashlib.sha256(ids.to(torch.int32).contiguous().numpy().tobytes()).hexdigest()[:16]


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
