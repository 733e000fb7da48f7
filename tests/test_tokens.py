"""Tokens to windows: what is drawn, in which order, from which text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qat.sections import Text
from qat.tokens import batches, windows


class Bytes:
    """A tokenizer whose ids are bytes; 256 ends a text."""

    eos_token_id = 256

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        assert options["add_special_tokens"] is False
        return {"input_ids": list(text.encode())}


def numbered(folder: Path, count: int) -> Text:
    """A text whose tokens are 0, 1, 2... so that a token is its own position."""
    path = folder / f"{count}.txt"
    path.write_text("x" * count)
    return Text(source=str(path))


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
        with pytest.raises(
            ValueError, match=rf"{count} tokens?, {whole} windows? of {length}; {sequences or 1} (is|are)"
        ):
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
    assert windows(Positions(), source, 20, 10).windows.flatten().equal(made[0].windows.flatten())
    assert windows(Positions(), source, 20, 10).fingerprint != made[0].fingerprint, "windows begin without a past"
    # the same tokens from another file are the same text
    (tmp_path / "copy.txt").write_text(Path(source.source).read_text())
    assert windows(Positions(), Text(source=str(tmp_path / "copy.txt")), 10, 20, 1).fingerprint == made[2].fingerprint


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


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_an_empty_file_is_too_short(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"empty.{kind}"
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"has 0 tokens, 0 windows of 8; 1 is asked for: give more text or a shorter"):
        windows(Bytes(), Text(source=str(path)), 8)


def test_the_order_of_windows_does_not_depend_on_global_state(tmp_path: Path) -> None:
    source, made = numbered(tmp_path, 500), []
    for seed in (0, 1):
        torch.manual_seed(seed)
        made.append(windows(Positions(), source, 10, 7, 3).windows)
    first: Tensor = made[0]
    assert torch.equal(first, made[1])
