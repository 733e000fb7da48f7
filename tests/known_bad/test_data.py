"""Texts that are no good: found before any work, whichever stages are reused."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from accelerate import tracking
from transformers import LlamaConfig

from qat import plan
from tests.known_bad.case import Case, Note, Place, Spoil, check, given, shown

CALIBRATE = "until=calibrate"


def text(content: str | bytes, name: str = "calibration.txt", part: str = "calibration") -> Spoil:
    """Another file as one of the texts."""

    def spoil(place: Place) -> list[str]:
        path = place.root / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return [f"data.{part}.source={path}"]

    return spoil


def copied(part: str) -> Spoil:
    """A text under the evaluation text's name, long enough to be cut into the same windows."""

    def spoil(place: Place) -> list[str]:
        shutil.copy(place.text(part), place.text("evaluation"))
        return ["data.evaluation.sequences=null"]

    return spoil


def inside(part: str) -> Spoil:
    """Most of the evaluation text in the midst of another one, so that no window is the same."""

    def spoil(place: Place) -> None:
        own, held = place.text(part).read_text(), place.text("evaluation").read_text()
        place.text(part).write_text(f"{own[:1001]} {held[: len(held) * 3 // 4]} {own[1001:]}")

    return spoil


def folder(place: Place) -> None:
    place.text("calibration").unlink()
    place.text("calibration").mkdir()


def calibrated(place: Place) -> str:
    made = json.loads((place.stage("calibrate") / "manifest.json").read_text())
    assert made["metrics"]["tokens"] == 4 * 32 and made["metrics"]["linears"] == 14
    return "calibrated on windows drawn from it"


def examples(*lines: str) -> Spoil:
    """A task of the gate with these lines, asked of a calibration that is not made yet."""

    def spoil(place: Place) -> list[str]:
        (place.root / "quiz.jsonl").write_text("\n".join(lines))
        given = f"gate.tasks={{offline: {{quiz: {place.root / 'quiz.jsonl'}}}}}"
        return [given, "scheme.weights.group_size=64", "export.formats=[dense]"]

    return spoil


LINE = "word and word " * 20000
GOOD = '{"context": "One", "choices": [" two", " three"], "answer": 0}'
CASES = [
    Case(
        "an example of a task that has no answer",
        "data",
        examples(GOOD, '{"context": "One", "choices": [" two", " three"], "answer": 2}'),
        ("gate.tasks.offline.quiz: ", "quiz.jsonl line 2: answer is the place of one of two or more choices"),
    ),
    Case("an empty text", "data", text(""), ("calibration.txt has 0 tokens, 0 windows of 32", "give more text")),
    Case(
        "a text of one token", "data", text("e"), ("calibration.txt has 1 token, 0 windows of 32", "a shorter length")
    ),
    Case(
        "an empty training text",
        "data",
        text("", "training.txt", "training"),
        ("data.training: ", "training.txt has 0 tokens", "give more text or a shorter train.length"),
    ),
    Case(
        "an empty evaluation text",
        "data",
        text("", "evaluation.txt", "evaluation"),
        ("data.evaluation: ", "evaluation.txt has 0 tokens", "give more text"),
    ),
    Case(
        "a text that is not UTF-8",
        "data",
        text(b"caf\xe9 \xff" * 1000),
        ("calibration.txt is not UTF-8 text", "convert it first (iconv -t utf-8)"),
    ),
    Case("one huge line", "data", text(LINE), code=0, good=calibrated),
    Case("one huge line of JSON", "data", text(json.dumps({"text": LINE}), "c.jsonl"), code=0, good=calibrated),
    Case("zero bytes as text", "data", text(b"\0" * 5000), code=0, good=calibrated),
    Case(
        "a line of JSON cut short",
        "data",
        text('{"text": "abc"}\n{"text": ', "c.jsonl"),
        ("c.jsonl line 2 is not JSON",),
    ),
    Case(
        "half a character in JSON (lone surrogate)",
        "data",
        text('{"text": "\\ud800 abc"}\n', "c.jsonl"),
        ("c.jsonl line 1 is no text", "surrogates not allowed", "write the file again"),
    ),
    Case(
        "null where text belongs",
        "data",
        text('{"text": null}\n', "c.jsonl"),
        ("data.calibration: ", "c.jsonl line 1 has no text column 'text'", "it holds None", "set `column`"),
    ),
    Case("a file that is no parquet", "data", text(b"PAR1xxxx", "c.parquet"), ("c.parquet is not a parquet file",)),
    Case(
        "a compressed text cut short",
        "data",
        text(b"\x1f\x8bxx", "c.txt.gz"),
        ("c.txt.gz is not a whole .gz file", "fetch it again"),
    ),
    Case("a folder as text", "data", folder, ("calibration.txt is a folder, not a text file",)),
    Case(
        "windows longer than the model reads",
        "data",
        given("data.calibration.length=512"),
        ("windows of 512 tokens are longer than the model reads (256)", "shorten length"),
    ),
    Case(
        "the training text under another name as evaluation text, calibration reused",
        "data",
        copied("training"),
        ("evaluation.txt holds text of data.training", "a model is judged on text that it was not made with"),
    ),
    Case(
        "the calibration text under another name as evaluation text, all but the gate reused",
        "data",
        copied("calibration"),
        ("evaluation.txt holds text of data.calibration", "choose another one"),
    ),
    Case(
        "most of the evaluation text inside the training text",
        "data",
        inside("training"),
        (
            "data.evaluation.source ",
            "evaluation.txt holds text of data.training",
            "of its runs of 13 words are in both",
        ),
    ),
    Case(
        "most of the evaluation text inside the calibration text",
        "data",
        inside("calibration"),
        ("evaluation.txt holds text of data.calibration", "choose another one"),
    ),
    Case(
        "the same file as calibration and evaluation text",
        "recipe",
        lambda place: [f"data.evaluation.source={place.text('calibration')}"],
        ("data.evaluation.source: ", "calibration.txt is also the calibration text; judge on held-out text"),
        code=2,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fault)
def test_a_text_that_is_no_good(case: Case, place: Place, capsys: pytest.CaptureFixture[str], note: Note) -> None:
    check(case, place, capsys, note)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("data.calibration.length=257", "data.calibration: windows of 257 tokens are {}; shorten length"),
        ("train.length=300", "data.training: windows of 300 tokens are {}; shorten train.length"),
        (
            "variants={a: {train: {length: 300}}, b: {train: null}}",
            "data.training: windows of 300 tokens are {}; shorten train.length",
        ),
        ("data.evaluation.length=257", "data.evaluation: windows of 257 tokens are {}; shorten length"),
    ],
)
def test_the_plan_says_of_long_windows_what_the_run_says(
    asked: str, said: str, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said.format("longer than the model reads (256)")
    before = set(place.run.glob("calibrate-*"))
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        plan.main(place.command(asked))
    assert place.start(asked) == 1 and text in capsys.readouterr().err
    assert set(place.run.glob("calibrate-*")) == before
    fits = asked.replace("257", "256").replace("300", "256")
    assert plan.main(place.command(fits)) == 0
    if "evaluation" in asked:
        assert plan.main(place.command(asked, "gate=null")) == 0  # then nobody reads it


def test_the_run_knows_what_a_model_reads_where_its_config_leaves_that_to_transformers(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    path, longest = place.model / "config.json", LlamaConfig().max_position_embeddings
    path.write_text(
        json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "max_position_embeddings"})
    )
    assert place.start(f"data.calibration.length={longest + 1}") == 1
    assert f"windows of {longest + 1} tokens are longer than the model reads ({longest})" in capsys.readouterr().err


def test_nothing_is_calibrated_for_a_stage_that_cannot_begin(
    place: Place, capsys: pytest.CaptureFixture[str], note: Note, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "_available_trackers", [])
    before = set(place.run.glob("calibrate-*"))
    trains = "train=[{steps: 1, batch: 2, length: 32}, {steps: 1, batch: 2, length: 32, trackers: wandb}]"
    assert place.start("scheme.weights.group_size=64", trains) == 1
    error = capsys.readouterr().err
    assert "train.1.trackers wandb is not installed: pip install wandb, or leave it out" in error
    quiz = examples(GOOD, "[]")(place)
    assert quiz and place.start(*quiz) == 1
    assert "quiz.jsonl line 2: an example has the keys" in capsys.readouterr().err
    assert set(place.run.glob("calibrate-*")) == before
    note("a tracker of the second training that is not installed", "plan", shown(error, place))
