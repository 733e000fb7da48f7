"""Text to windows: what is read, what is drawn, and what cannot be read."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoTokenizer

from qat.micro import make_micro
from qat.tokens import batches, documents, tokenize, windows

TEXTS = ["The first text.\n", "A second, caf\u00e9.", "\u6f22\u5b57 " * 40]


class Bytes:
    """A tokenizer whose ids are bytes; 256 ends a text."""

    eos_token_id = 256

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        assert options["add_special_tokens"] is False
        return {"input_ids": list(text.encode())}


def numbered(folder: Path, count: int) -> str:
    """A text whose tokens are 0, 1, 2... so that a token is its own position."""
    path = folder / f"{count}.txt"
    path.write_text("x" * count)
    return str(path)


class Positions:
    eos_token_id = None

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": list(range(len(text)))}


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 200), length=st.integers(1, 40), seed=st.none() | st.integers(0, 9), data=st.data())
def test_windows_are_disjoint_whole_and_in_text_order(
    tmp_path_factory: pytest.TempPathFactory, count: int, length: int, seed: int | None, data: st.DataObject
) -> None:
    source = numbered(tmp_path_factory.getbasetemp(), count)
    whole = count // length
    sequences = data.draw(st.none() | st.integers(1, whole + 2))
    if whole < (sequences or 1):
        with pytest.raises(ValueError, match=rf"{count} tokens, {whole} windows of {length}; {sequences or 1} are"):
            windows(Positions(), source, length, sequences, seed)
        return
    made = windows(Positions(), source, length, sequences, seed)
    assert made.windows.shape == (sequences or whole, length) and made.num_tokens == made.windows.numel()
    starts = made.windows[:, 0].tolist()
    assert starts == sorted(set(starts)) and all(start % length == 0 for start in starts)
    assert torch.equal(made.windows, made.windows[:, :1] + torch.arange(length))
    if seed is None:
        assert starts == [i * length for i in range(len(starts))]
    again = windows(Positions(), source, length, sequences, seed)
    assert torch.equal(made.windows, again.windows) and made.fingerprint == again.fingerprint


def test_a_seed_draws_other_windows_and_another_fingerprint(tmp_path: Path) -> None:
    source = numbered(tmp_path, 1000)
    made = [windows(Positions(), source, 10, 20, seed) for seed in (None, 0, 1)]
    assert len({corpus.fingerprint for corpus in made}) == 3
    # the same tokens from another file are the same text
    (tmp_path / "copy.txt").write_text(Path(source).read_text())
    assert windows(Positions(), str(tmp_path / "copy.txt"), 10, 20, 1).fingerprint == made[2].fingerprint


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 12), batch=st.integers(1, 7), seed=st.integers(0, 5))
def test_each_pass_over_the_windows_is_a_permutation(count: int, batch: int, seed: int) -> None:
    corpus = torch.arange(count)[:, None]
    steps = -(-3 * count // batch)
    seen = torch.cat([batches(corpus, batch, seed, step) for step in range(steps)]).flatten().tolist()
    for start in range(0, 3 * count, count):
        assert sorted(seen[start : start + count]) == list(range(count))
    state = torch.random.get_rng_state()
    for step in reversed(range(steps)):  # in any order, whatever was drawn before
        torch.rand(1)
        assert batches(corpus, batch, seed, step).flatten().tolist() == seen[step * batch : (step + 1) * batch]
    torch.random.set_rng_state(state)


def test_passes_and_seeds_have_orders_of_their_own() -> None:
    corpus = torch.arange(50)[:, None]
    orders = [batches(corpus, 50, seed, step).flatten().tolist() for seed, step in ((0, 0), (0, 1), (5, 0))]
    assert len({tuple(order) for order in orders}) == 3


def jsonl(texts: list[str], column: str = "text") -> bytes:
    return "".join(json.dumps({"id": 1, column: text}, ensure_ascii=False) + "\n" for text in texts).encode()


def parquet(path: Path, texts: list[Any], column: str = "text") -> None:
    pyarrow.parquet.write_table(pyarrow.table({column: texts, "id": list(range(len(texts)))}), path)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "jsonl": lambda p: p.write_bytes(jsonl(TEXTS)),
    "jsonl.xz": lambda p: p.write_bytes(lzma.compress(jsonl(TEXTS))),
    "jsonl.gz": lambda p: p.write_bytes(gzip.compress(jsonl(TEXTS))),
    "parquet": lambda p: parquet(p, TEXTS),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_every_kind_of_file_gives_the_same_tokens(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"texts.{kind}"
    WRITERS[kind](path)
    assert list(documents(str(path), None, "text")) == TEXTS
    expected: list[int] = []
    for number, text in enumerate(TEXTS):
        expected += ([256] if number else []) + list(text.encode())
    assert tokenize(Bytes(), str(path)).tolist() == expected


@pytest.mark.parametrize("packed", ["txt", "txt.xz", "txt.gz"])
def test_a_text_file_is_one_text(tmp_path: Path, packed: str) -> None:
    path, content = tmp_path / f"book.{packed}", "\n".join(TEXTS).encode()
    pack = {"txt": bytes, "txt.xz": lzma.compress, "txt.gz": gzip.compress}[packed]
    path.write_bytes(pack(content))
    assert bytes(tokenize(Bytes(), str(path)).tolist()) == content


def test_no_token_is_added_by_a_real_tokenizer(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_micro(tmp_path / "micro"))
    path = tmp_path / "long.txt"
    path.write_text("".join(TEXTS) * 20)
    ids = tokenize(tokenizer, str(path))
    assert len(ids) == path.stat().st_size  # its tokens are bytes
    assert tokenizer.decode(ids) == path.read_text()


def test_any_column_can_hold_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS, "content") + b"\n  \n")
    parquet(tmp_path / "a.parquet", TEXTS, "content")
    for kind in ("jsonl", "parquet"):
        assert list(documents(str(tmp_path / f"a.{kind}"), None, "content")) == TEXTS


def cut_short(content: bytes) -> bytes:
    return content[: len(content) // 2]


BAD: dict[str, tuple[str, bytes | Callable[[Path], Any], str]] = {
    "Latin-1": ("txt", "caf\u00e9 ".encode("latin-1"), r"is not UTF-8 text.*iconv"),
    "Latin-1 in JSON": ("jsonl", b'{"text": "caf\xe9"}\n', r"is not UTF-8 text.*iconv"),
    "not JSON": ("jsonl", jsonl(TEXTS) + b"{oops\n", r"a\.jsonl line 4 is not JSON"),
    "no column": ("jsonl", jsonl(TEXTS, "body"), r"line 1 has no text column 'text' \(found \['body', 'id'\]\)"),
    "a number": ("jsonl", b'{"text": "a"}\n{"text": 3}\n', r"line 2 has no text column.*set data\.<part>\.column"),
    "a list": ("jsonl", b"[1, 2]\n", r"line 1 has no text column 'text' \(found list\)"),
    "no parquet column": ("parquet", lambda p: parquet(p, TEXTS, "body"), r"no text column 'text' \(found .*'body'"),
    "a parquet number": ("parquet", lambda p: parquet(p, [1, 2]), r"row \d+ has no text column 'text'"),
    "not parquet": ("parquet", b"PAR1 and so on", r"a\.parquet"),
    "cut xz": ("txt.xz", cut_short(lzma.compress(b"text " * 999)), r"a\.txt\.xz is not a whole"),
    "not xz": ("txt.xz", b"plain text", r"a\.txt\.xz is not a whole"),
    "cut gz": ("txt.gz", cut_short(gzip.compress(bytes(range(256)) * 9)), r"a\.txt\.gz is not a whole"),
    "not gz": ("jsonl.gz", b"plain text", r"a\.jsonl\.gz is not a whole"),
    "another kind": ("pdf", b"%PDF", r"text comes from \.txt, \.jsonl or \.parquet files.* not '\.pdf'"),
    "packed only": ("gz", b"?", r"text comes from \.txt, \.jsonl or \.parquet files"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_read_says_where_and_why(tmp_path: Path, what: str) -> None:
    kind, content, why = BAD[what]
    path = tmp_path / f"a.{kind}"
    if callable(content):
        content(path)
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=why):
        tokenize(Bytes(), str(path))


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_an_empty_file_is_too_short(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"empty.{kind}"
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"has 0 tokens, 0 windows of 8; 1 are asked for: give more text"):
        windows(Bytes(), str(path), 8)


@pytest.mark.parametrize("source", ["missing.txt", "/no/such/folder", "./data", "missing.jsonl.xz"])
def test_a_file_that_is_not_there_is_not_looked_for_on_the_hub(source: str) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        tokenize(Bytes(), source)


def test_the_order_of_windows_does_not_depend_on_global_state(tmp_path: Path) -> None:
    source, made = numbered(tmp_path, 500), []
    for seed in (0, 1):
        torch.manual_seed(seed)
        made.append(windows(Positions(), source, 10, 7, 3).windows)
    first: Tensor = made[0]
    assert torch.equal(first, made[1])
