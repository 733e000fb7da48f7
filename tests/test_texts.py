"""Sources of text: files, rows, chats, hub datasets; what is read of them, and what cannot be read."""

from __future__ import annotations

import gzip
import json
import lzma
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from pydantic import ValidationError
from transformers import AutoTokenizer

from qat import texts
from qat.micro import make_micro
from qat.sections import Text
from qat.tokens import tokenize, windows
from tests.test_tokens import Bytes

TEXTS = ["The first text.\n", "A second, caf\u00e9.", "\u6f22\u5b57 " * 40]


def read(path: Path, **more: Any) -> list[str]:
    return [piece.text for piece in texts.pieces(Text(source=str(path), **more))]


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
    assert read(path) == TEXTS
    expected: list[int] = []
    for number, text in enumerate(TEXTS):
        expected += ([256] if number else []) + list(text.encode())
    assert tokenize(Bytes(), Text(source=str(path))).tolist() == expected


@pytest.mark.parametrize("packed", ["txt", "txt.xz", "txt.gz"])
def test_a_text_file_is_one_text(tmp_path: Path, packed: str) -> None:
    path, content = tmp_path / f"book.{packed}", "\n".join(TEXTS).encode()
    pack = {"txt": bytes, "txt.xz": lzma.compress, "txt.gz": gzip.compress}[packed]
    path.write_bytes(pack(content))
    assert bytes(tokenize(Bytes(), Text(source=str(path))).tolist()) == content


def test_no_token_is_added_by_a_real_tokenizer(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_micro(tmp_path / "micro"))
    path = tmp_path / "long.txt"
    path.write_text("".join(TEXTS) * 20)
    ids = tokenize(tokenizer, Text(source=str(path)))
    assert len(ids) == path.stat().st_size  # its tokens are bytes
    assert tokenizer.decode(ids) == path.read_text()


def test_any_column_can_hold_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS, "content") + b"\n  \n")
    parquet(tmp_path / "a.parquet", TEXTS, "content")
    for kind in ("jsonl", "parquet"):
        assert read(tmp_path / f"a.{kind}", column="content") == TEXTS


def cut_short(content: bytes) -> bytes:
    return content[: len(content) // 2]


MANY = "".join(map(chr, range(32, 9999))).encode()
BAD: dict[str, tuple[str, bytes | Callable[[Path], Any], str]] = {
    "Latin-1": ("txt", "caf\u00e9 ".encode("latin-1"), r"is not UTF-8 text.*iconv"),
    "Latin-1 in JSON": ("jsonl", b'{"text": "caf\xe9"}\n', r"is not UTF-8 text.*iconv"),
    "not JSON": ("jsonl", jsonl(TEXTS) + b"{oops\n", r"a\.jsonl line 4 is not JSON"),
    "no column": ("jsonl", jsonl(TEXTS, "body"), r"line 1 has no text column 'text' or .* \(found \['body', 'id'\]\)"),
    "a number": ("jsonl", b'{"text": "a"}\n{"text": 3}\n', r"line 2 has no text column.*set `column` to"),
    "a wrong key of a chat": (
        "jsonl",
        b'{"messages": [{"role": "user", "content": "a"}, {"rolle": "user", "content": "a"}]}',
        r"line 1 is a chat in column 'messages', but its message 2 has no role \(found \['content', 'rolle'\]\)",
    ),
    "a chat without content": ("jsonl", b'{"messages": [{"role": "user", "text": "a"}]}', r"message 1 has no content "),
    "a list": ("jsonl", b"[1, 2]\n", r"line 1 has no text column 'text' or 'messages' \(found list\)"),
    "no parquet column": ("parquet", lambda p: parquet(p, TEXTS, "body"), r"no text column 'text' or .*found .*'body'"),
    "a parquet number": ("parquet", lambda p: parquet(p, [1, 2]), r"row \d+ has no text column 'text'"),
    "not parquet": ("parquet", b"PAR1 and so on", r"a\.parquet"),
    "cut xz": ("txt.xz", cut_short(lzma.compress(b"text " * 999)), r"a\.txt\.xz is not a whole"),
    "not xz": ("txt.xz", b"plain text", r"a\.txt\.xz is not a whole"),
    "cut gz": ("txt.gz", cut_short(gzip.compress(MANY)), r"a\.txt\.gz is not a whole"),
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
        tokenize(Bytes(), Text(source=str(path)))


@pytest.mark.parametrize("source", ["missing.txt", "/no/such/folder", "./data", "missing.jsonl.xz"])
def test_a_file_that_is_not_there_is_not_looked_for_on_the_hub(source: str) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        tokenize(Bytes(), Text(source=source))


def chats(questions: list[str]) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": q}, {"role": "assistant", "content": q.upper()}] for q in questions]


def chat_rows(path: Path, kind: str, column: str = "messages") -> str:
    rows = [{"id": i, column: chat} for i, chat in enumerate(chats(["one", "two"]))]
    file = path / f"chats.{kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return str(file)


TEMPLATE = """{% if messages[0].role != 'user' %}{{ raise_exception('a user begins') }}{% endif %}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"""


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A real tokenizer with a chat template."""
    tokenizer = AutoTokenizer.from_pretrained(make_micro(tmp_path_factory.mktemp("chat") / "micro"))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_chats_are_written_by_the_tokenizers_template(tmp_path: Path, kind: str, chatty: Any) -> None:
    said = ["<user>one<assistant>ONE", "<user>two<assistant>TWO"]
    for column, asked in (("messages", None), ("messages", "messages"), ("talk", "talk")):
        text = Text(source=chat_rows(tmp_path, kind, column), column=asked)
        assert [piece.text for piece in texts.pieces(text, chatty)] == said
    ids = tokenize(chatty, text).tolist()
    assert ids == chatty(said[0])["input_ids"] + [chatty.eos_token_id] + chatty(said[1])["input_ids"]


def test_text_comes_before_messages(tmp_path: Path, chatty: Any) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chats(["one"])[0], "text": "plain"}))
    assert read(tmp_path / "a.jsonl") == ["plain"]
    text = Text(source=str(tmp_path / "a.jsonl"), column="messages")
    assert [piece.text for piece in texts.pieces(text, chatty)] == ["<user>one<assistant>ONE"]


def test_a_chat_without_a_template_says_the_way_out(tmp_path: Path) -> None:
    plain = AutoTokenizer.from_pretrained(make_micro(tmp_path / "micro"))
    assert plain.chat_template is None
    with pytest.raises(ValueError, match=r"line 1 is a chat in column 'messages', but .* no chat template: name a col"):
        tokenize(plain, Text(source=chat_rows(tmp_path, "jsonl")))


def test_a_chat_that_the_template_refuses_is_named(tmp_path: Path, chatty: Any) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": chats(["one"])[0][1:]}))
    with pytest.raises(ValueError, match=r"a\.jsonl line 1: the tokenizer's chat template .*: a user begins"):
        tokenize(chatty, Text(source=str(tmp_path / "a.jsonl")))


class Lengths:
    """A tokenizer with a token for every 64 characters, whose id is the number of characters it was given."""

    eos_token_id = None

    def __init__(self) -> None:
        self.given = list[int]()

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        self.given.append(len(text))
        return {"input_ids": [len(text)] * (len(text) // 64)}


@pytest.mark.parametrize("packed", [False, True])
def test_of_a_large_file_no_more_than_asked_is_read_or_held(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / ("large.txt.gz" if packed else "large.txt")
    if packed:
        path.write_bytes(gzip.compress(b"word " * 8_000_000, 1) * 5)  # 200 MB
    else:
        with path.open("wb") as f:
            f.truncate(5 * 2**30)  # holes, which read as NUL characters
    tracemalloc.start()
    try:
        tokenizer = Lengths()
        drawn = windows(tokenizer, Text(source=str(path), max_mb=20), 512, 128, seed=0)
        assert drawn.windows.shape == (128, 512) and sum(tokenizer.given) == 20_000_000
        assert max(tokenizer.given) <= 2 * texts.PIECE
        first = Lengths()
        windows(first, Text(source=str(path), max_mb=5000), 512, 30)
        assert len(first.given) == 1  # the first piece has enough
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    finally:
        tracemalloc.stop()


def test_a_long_text_is_cut_where_a_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "PIECE", 50)
    lines = (
        "".join(f"line {n} of a poem\n" for n in range(40)) + "and a line that is longer than a piece " * 5 + "x" * 120
    )
    (tmp_path / "long.txt").write_text(lines)
    found = list(texts.pieces(Text(source=str(tmp_path / "long.txt"))))
    assert "".join(piece.text for piece in found) == lines
    assert [piece.begins for piece in found] == [True] + [False] * (len(found) - 1)
    assert all(piece.text.endswith("\n") for piece in found[:12])
    # no end-of-text token where a text goes on
    assert bytes(tokenize(Bytes(), Text(source=str(tmp_path / "long.txt"))).tolist()).decode() == lines
    whole = tokenize(Bytes(), Text(source=str(tmp_path / "long.txt"), max_mb=1e-4))
    assert bytes(whole.tolist()).decode() == lines[:100]


def test_a_dataset_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "corpus").mkdir()
    parquet(tmp_path / "corpus" / "train-0.parquet", [f"text {n}" for n in range(50)])
    parquet(tmp_path / "corpus" / "train-1.parquet", [f"text {n}" for n in range(50, 90)])
    streamed = Text(source="corpus", split="train", stream=True)
    assert [piece.text for piece in texts.pieces(streamed)] == [f"text {n}" for n in range(90)]
    assert not list((tmp_path / "cache").rglob("*.arrow"))
    seen = list[str]()
    load = datasets.load_dataset

    def counted(*args: Any, **more: Any) -> Any:
        assert more["streaming"] is True
        return load(*args, **more).map(lambda row: seen.append(row["text"]) or row)

    monkeypatch.setattr("datasets.load_dataset", counted)
    made = windows(Bytes(), streamed, 8, 3)
    assert len(seen) < 10 and made.windows[0].tolist() == [*b"text 0", 256, *b"t"]


@pytest.mark.parametrize("key", ["split", "config", "revision", "stream"])
def test_keys_of_the_hub_have_no_effect_on_a_file(key: str) -> None:
    with pytest.raises(ValidationError, match=rf"(?s){key}.*is for hub datasets, and a\.jsonl is a file"):
        Text.model_validate({"source": "a.jsonl", key: True if key == "stream" else "x"})


@pytest.mark.parametrize("source", ["a.txt", "a.txt.xz"])
def test_plain_text_has_no_columns(source: str) -> None:
    with pytest.raises(ValidationError, match="is plain text, which has none"):
        Text.model_validate({"source": source, "column": "text"})
