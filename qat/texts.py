"""The texts of a source, one piece after the other from its start: no file and no hub dataset is whole in memory.

Sources: a .txt file, a .jsonl(.xz/.gz) or .parquet file, or a hub dataset id. A row holds text, or a chat (a list of
{role, content}), which the tokenizer's chat template writes as text.
"""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError
from pyarrow import ArrowException
from pyarrow.parquet import ParquetFile

from qat.sections import TEXT_FILES, Text, text_kind

OPENERS = {".xz": lzma.open, ".gz": gzip.open}
COLUMNS = ("text", "messages")  # looked for, in this order, where `column` is not given
PIECE = 2**20  # characters of a .txt file that are handed out at once; a longer text is cut at the end of a line
ROWS = 512  # of a parquet file that are in memory at once


class Piece(NamedTuple):
    """begins: it is the first piece of a text, not the continuation of the last piece."""

    text: str
    begins: bool


def pieces(text: Text, tokenizer: Any = None) -> Iterator[Piece]:
    """The first `text.max_mb` million characters of a source. tokenizer: has the chat template, where rows are chats.

    Raises ValueError, naming file and line, for what cannot be read.
    """
    left = int(text.max_mb * 1e6)
    for piece in _all(text, tokenizer):
        yield Piece(piece.text[:left], piece.begins)
        left -= len(piece.text)
        if left <= 0:
            return


def _all(text: Text, tokenizer: Any) -> Iterator[Piece]:
    path = Path(text.source)
    kind = text_kind(text.source)
    opener: Any = OPENERS.get(path.suffix, open)
    if not path.is_file():
        yield from (_piece(row, text, tokenizer, where) for where, row in _hub_rows(text))
        return
    try:
        if kind == ".parquet":
            yield from (_piece(row, text, tokenizer, where) for where, row in _parquet_rows(path, text.column))
        elif kind == ".jsonl":
            with opener(path, "rt", encoding="utf-8") as f:
                for number, line in enumerate(f, 1):
                    if line.strip():
                        yield _piece(json.loads(line), text, tokenizer, f"{path} line {number}")
        elif kind == ".txt":
            with opener(path, "rt", encoding="utf-8") as f:
                yield from _of_file(f)
        else:
            raise ValueError(f"{path}: text comes from .txt, .jsonl or .parquet files (also .xz, .gz), not {kind!r}")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}; convert it first (iconv -t utf-8)") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} line {number} is not JSON: {error}") from error
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a whole {path.suffix} file: {error}; fetch it again") from error


def _of_file(file: Any) -> Iterator[Piece]:
    """A text file, cut after the last end of a line that fits, else before a space, else anywhere."""
    rest, begins = "", True
    while len(chunk := file.read(PIECE)) == PIECE:
        chunk = rest + chunk
        end = chunk.rfind("\n") + 1 or max(chunk.rfind(" "), 0) or len(chunk)
        yield Piece(chunk[:end], begins)
        rest, begins = chunk[end:], False
    yield Piece(rest + chunk, begins)


def _parquet_rows(path: Path, column: str | None) -> Iterator[tuple[str, Any]]:
    """Straight from the file, a few rows at a time: `datasets` would first make a copy of it in its cache."""
    try:
        file = ParquetFile(path)
    except ArrowException as error:
        raise ValueError(f"{path} is not a parquet file: {error}") from error
    there = [name for name in ([column] if column else COLUMNS) if name in file.schema_arrow.names]
    batches = file.iter_batches(ROWS, columns=there[:1] or None)  # None: the error for the row names the columns
    for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), 1):
        yield f"{path} row {number}", row


def _hub_rows(text: Text) -> Iterator[tuple[str, Any]]:
    source = text.source
    if source.startswith(("/", ".", "~")) or Path(source).suffix in TEXT_FILES:
        what = "is a folder, not a text file" if Path(source).is_dir() else "does not exist"
        raise ValueError(f"text file {source} {what}")
    from datasets import disable_progress_bars, load_dataset

    disable_progress_bars()  # they would be in the midst of Tare's own

    split, more = text.split or "train", {"revision": text.revision, "streaming": text.stream}
    try:
        rows = load_dataset(source, text.config, split=split, **more)
    except (FileNotFoundError, ConnectionError, ValueError) as error:
        raise ValueError(
            f"dataset {source!r} is no local file and could not be loaded from the hub: {error}"
        ) from error
    for number, row in enumerate(rows):
        yield f"{source} row {number}", row


def _piece(row: Any, text: Text, tokenizer: Any, where: str) -> Piece:
    """The text of a row, or its chat as text."""
    columns = [text.column] if text.column else [name for name in COLUMNS if isinstance(row, dict) and name in row]
    value = row.get(columns[0]) if isinstance(row, dict) and columns else None
    if isinstance(value, str):
        return Piece(_whole(value, where), True)
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        held = f"found {sorted(row) if isinstance(row, dict) else type(row).__name__}"
        if isinstance(row, dict) and columns and columns[0] in row:
            held = f"it holds {value!r:.40}"
        named = " or ".join(map(repr, columns or COLUMNS))
        raise ValueError(
            f"{where} has no text column {named} ({held}); set `column` to one of texts, or of chats, which are lists "
            "of {role, content}"
        )
    for number, message in enumerate(value, 1):
        needed = ("role",) if "tool_calls" in message else ("role", "content")
        if missing := [key for key in needed if key not in message]:
            raise ValueError(
                f"{where} is a chat in column {columns[0]!r}, but its message {number} has no "
                f"{' and no '.join(missing)} (found {sorted(message)}); a message is {{role, content}}"
            )
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            f"{where} is a chat in column {columns[0]!r}, but the model's tokenizer has no chat template: name a "
            "column of plain text in `column`, or put a template beside the tokenizer as chat_template.jinja"
        )
    try:
        return Piece(_whole(tokenizer.apply_chat_template(value, tokenize=False), where), True)
    except (TemplateError, TypeError, KeyError) as error:  # what templates raise for chats that they are not for
        raise ValueError(f"{where}: the tokenizer's chat template does not take this chat: {error}") from error


def _whole(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} is no text: {error}; write the file again with whole characters") from error
    return text
