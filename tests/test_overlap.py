"""Decontamination: n-grams against a slow loop, what is cut out and what stays, and what a run does about it."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qat import outline
from qat.overlap import MARGIN, Cutter, HeldOut, ngrams, sentence
from qat.plugins import ROOT
from qat.recipe import load
from qat.train import main

TEXT = ROOT / "recipes/demo/text"
WORDS = ["a", "of", "The", "sea", "é", "ζώα", "Straße", "1941", "don't", "x-y"]
prose = st.lists(st.sampled_from([*WORDS, ", ", ".\n\n", "  "]), max_size=60).map(" ".join)


def slow(text: str, n: int) -> list[tuple[tuple[str, ...], int, int]]:
    """The words of each n-gram with its place, by a regular expression."""
    found = [(match[0].lower(), match.start(), match.end()) for match in re.finditer(r"[^\W_]+", text)]
    rows = [found[i : i + n] for i in range(len(found) - n + 1)]
    return [(tuple(word for word, _, _ in row), row[0][1], row[-1][2]) for row in rows]


@settings(max_examples=60, deadline=None)
@given(text=prose, n=st.integers(1, 5))
def test_ngrams_are_those_of_a_slow_loop(text: str, n: int) -> None:
    hashes, starts, ends = ngrams(text, n)
    expected = slow(text, n)
    assert [(a, b) for _, a, b in expected] == list(zip(starts.tolist(), ends.tolist(), strict=True))
    words = {}
    for value, (gram, _, _) in zip(hashes.tolist(), expected, strict=True):
        assert words.setdefault(value, gram) == gram
    assert len(words) == len({gram for gram, _, _ in expected})


def test_long_words_and_ideographs() -> None:
    long = "x" * 300
    assert ngrams(f"{long} {'x' * 299}y", 1)[0].tolist() != ngrams(f"{long} {long}", 1)[0].tolist()
    assert len(ngrams("漢字かな交じり", 3)[0]) == 5  # each a word
    assert len(ngrams("ein Wort", 3)[0]) == 0


def book(seed: int, count: int) -> list[str]:
    random_words = random.Random(seed)
    return ["".join(random_words.choices("abcdefghij", k=random_words.randint(2, 9))) for _ in range(count)]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 99), places=st.lists(st.integers(0, 400), min_size=1, max_size=4), count=st.integers(1, 40))
def test_what_remains_shares_no_ngram_and_the_rest_stays(seed: int, places: list[int], count: int) -> None:
    evaluation, training = book(seed, 300), book(seed + 1000, 400)
    for place in sorted(places, reverse=True):
        training[place:place] = evaluation[place % 200 : place % 200 + count]
    text, cutter = " ".join(training), Cutter(HeldOut({"e": [" ".join(evaluation)]}, 13))
    kept = cutter(text)
    held = {gram for gram, _, _ in slow(" ".join(evaluation), 13)}
    assert not any(gram in held for part in kept for gram, _, _ in slow(part, 13))
    where = [(a, b) for gram, a, b in slow(text, 13) if gram in held]
    assert (kept == [text]) == (not where) and cutter.read == len(text)
    counts = cutter.counts()
    assert counts["cut"] == len(text) - sum(map(len, kept)) and bool(counts["passages"]) == bool(where)
    # nothing further away than the margins is lost, but scraps shorter than a margin
    lost = sum(b - a + 2 * MARGIN for a, b in where) + MARGIN * (len(where) + 1)
    assert counts["cut"] <= lost


def test_case_spacing_and_punctuation_hide_nothing() -> None:
    passage = book(7, 40)
    loud = "\n".join(word.upper() + ";" for word in passage)
    text = " ".join([*book(1, 200), loud, *book(2, 200)])
    cutter = Cutter(HeldOut({"e": [" ".join(passage)], "other": [" ".join(book(3, 50))]}, 13))
    assert len(cutter(text)) == 2 and cutter.share("e") == 1 and cutter.share("other") == 0
    fewer = Cutter(HeldOut({"e": [" ".join(passage)]}, 41))
    assert fewer(text) == [text]


def test_the_demo_trains_on_nothing_that_it_is_judged_on() -> None:
    held = HeldOut({"e": [(TEXT / "evaluation.txt").read_text()]}, 13)
    for name in ("calibration", "training"):
        text = (TEXT / f"{name}.txt").read_text()
        assert Cutter(held)(text) == [text]


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


WHOLE = ("recipe=micro.yaml", "data.training.max_mb=2", "data.evaluation.max_mb=2")


def test_a_run_cuts_and_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluation, training = (TEXT / "evaluation.txt").read_text(), (TEXT / "training.txt").read_text()[:40_000]
    rows = [training[:20_000] + evaluation[5_000:7_000] + training[20_000:], evaluation[100:600]]
    (tmp_path / "training.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    task = {"context": training[1_000:1_300], "continuation": " x"}
    (tmp_path / "task.jsonl").write_text(json.dumps(task) + "\n")
    arguments = [*WHOLE, f"output={tmp_path}", f"data.training.source={tmp_path / 'training.jsonl'}"]
    tasks = f"gate.tasks={{offline: {{quiz: {tmp_path / 'task.jsonl'}}}}}"
    assert main([*arguments, tasks, "until=train"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "cut out" in line]
    assert len(said) == 1 and said[0].startswith("training text: ") and "3 passages in 2 texts" in said[0]
    stages = {s["name"]: s for s in json.loads((tmp_path / "micro/summary.json").read_text())["stages"]}
    found = stages["train"]["metrics"]["overlap"]
    assert found["passages"] == 3 and found["texts"] == 2 and found["read"] == sum(map(len, rows))
    assert 2_800 < found["cut"] < 2_800 + 7 * MARGIN
    assert found["found"]["gate.tasks.offline.quiz"] > 0.9 and 0 < found["found"]["data.evaluation.source"] < 0.05
    assert stages["calibrate"]["metrics"]["overlap"]["passages"] == 0
    facts = dict(json.loads((tmp_path / "micro/report.json").read_text())["facts"])
    assert "3 passages in 2 texts" in facts["training text"] and "no 13 words" in facts["calibration text"]
    assert main([*arguments, tasks, "until=train", "data.decontaminate=null", "name=all"]) == 0
    stages = {s["name"]: s for s in json.loads((tmp_path / "all/summary.json").read_text())["stages"]}
    assert stages["train"]["metrics"]["overlap"] is None


def test_one_is_said_in_the_singular() -> None:
    counts = {"read": 900, "cut": 1, "passages": 1, "texts": 1, "words": 13}
    assert "1 passage in 1 text, 1 character (0.11%)" in sentence(counts)
    assert "2 passages in 1 text, 1,000 characters" in sentence(counts | {"passages": 2, "cut": 1000})


def test_evaluation_text_within_training_text_names_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "all.txt"
    path.write_text((TEXT / "training.txt").read_text() + (TEXT / "evaluation.txt").read_text().upper())
    assert main([*WHOLE, f"output={tmp_path}", f"data.training.source={path}"]) == 1
    said = capsys.readouterr().err
    assert re.search(
        r"data\.evaluation\.source \S+evaluation\.txt holds text of data\.training \(\S+all\.txt\): \d+%", said
    )


def keys(*more: str) -> dict[str, Any]:
    recipe = load(["recipe=micro.yaml", *more])
    root = outline.inputs(recipe, ROOT / "recipes/demo/model", lambda path: path.read_text(errors="ignore")[:999])
    steps = outline.outline(recipe, root)
    return {step.label: key for step, key in zip(steps, outline.keys(steps), strict=True)}


@pytest.mark.parametrize(("change", "changed"), [
    ("data.decontaminate=20", {"calibrate", "train"}), ("data.decontaminate=null", {"calibrate", "train"}),
    ("data.evaluation.source=README.md", {"calibrate", "train"}), ("data.evaluation.max_mb=1", {"calibrate", "train"}),
    ("data.evaluation.sequences=5", set()), ("data.evaluation.length=64", set()), ("data.evaluation.seed=1", set()),
])  # fmt: skip
def test_keys_depend_on_what_is_held_out_not_on_which_of_it_is_judged(change: str, changed: set[str]) -> None:
    before, after = keys(), keys(change)
    assert {name for name in ("calibrate", "train") if before[name] != after[name]} == changed
    assert before["gate"] != after["gate"]


def test_keys_depend_on_the_questions_of_tasks(tmp_path: Path) -> None:
    path, found = tmp_path / "task.jsonl", []
    for context in ("one", "two"):
        path.write_text(json.dumps({"context": context, "continuation": " x"}))
        found.append(keys(f"gate.tasks={{offline: {{a: {path}}}}}")["calibrate"])
    found += [keys()["calibrate"], keys("gate.tasks={lm_eval: [arc_easy]}")["calibrate"]]
    assert len(set(found)) == 4
