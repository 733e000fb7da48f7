"""`tare compare --task`: checkpoints of any origin asked the same questions, against transformers' own forward pass."""

from __future__ import annotations

import csv
import importlib.util
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig, LlamaForCausalLM
from typer.testing import CliRunner

from gate import _examples, _generate, _lm_eval, _measure
from qat import compare
from qat.cli import app
from qat.micro import make_micro
from qat.plugins import ROOT
from qat.train import main
from tests.page import numbers

TEXT = ROOT / "recipes/demo/text/evaluation.txt"
WORDS = TEXT.read_text(encoding="utf-8").encode("ascii", "ignore").decode().split()[:2000]


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name in ("TARE_LOG", "TARE_PROGRESS"):  # the command sets them; this brings them back
        monkeypatch.setenv(name, "")


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def preferred(model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]]) -> list[int]:
    """The place of the choice with the largest log-likelihood a character, one sequence at a time."""
    found = []
    for row in rows:
        rates = []
        for text in row["choices"]:
            ids = torch.tensor([tokenizer(row["context"] + text, add_special_tokens=False)["input_ids"]])
            count = len(tokenizer(text, add_special_tokens=False)["input_ids"])
            with torch.no_grad():
                logp = model(ids).logits[0].double().log_softmax(-1)
            rates.append(sum(logp[-1 - n, ids[0, -n]].item() for n in range(count, 0, -1)) / len(text))
        found.append(rates.index(max(rates)))
    return found


def save(file: Path, rows: Sequence[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


class Place:
    """A run whose gate asked a task; not to be changed.

    export: its compressed-tensors directory. foreign: what transformers makes of that, in float32. damaged: the same
    with what its MLPs add turned around and three times as large. rows: questions, of which the parent answers
    all right.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "one"
        recipe = yaml.safe_load((ROOT / "recipes/micro.yaml").read_text())
        recipe |= {"train": None, "gate": {**recipe["gate"], "tasks": {"offline": {"words": "words.jsonl"}}}}
        (folder / "one.yaml").write_text(yaml.safe_dump(recipe))
        self.parent = make_micro(folder / ".parents/micro")
        self.tokenizer = AutoTokenizer.from_pretrained(self.parent)
        self.models = {"parent": LlamaForCausalLM.from_pretrained(self.parent).float().eval()}
        parts = [WORDS[20 * n :][:8] for n in range(60)]
        self.rows: list[dict[str, Any]] = [
            {"context": " ".join(words[:5]), "choices": [f" {word}" for word in words[5:]]} for words in parts
        ]
        for row, answer in zip(self.rows, preferred(self.models["parent"], self.tokenizer, self.rows), strict=True):
            row["answer"] = answer
        self.task = save(folder / "words.jsonl", self.rows)
        assert main([f"recipe={folder / 'one.yaml'}", f"output={folder}"]) == 0
        self.verdict = json.loads((self.run / "verdict.json").read_text())
        said = json.loads((self.run / "summary.json").read_text())
        self.export = (self.run / said["exports"]["compressed_tensors"]["path"]).resolve()
        for name in ("foreign", "damaged"):
            how = CompressedTensorsConfig(dequantize=True)
            whole = AutoModelForCausalLM.from_pretrained(self.export, quantization_config=how, dtype=torch.float32)
            model = LlamaForCausalLM(self.models["parent"].config).float().eval()
            model.load_state_dict(whole.state_dict())
            if name == "damaged":
                with torch.no_grad():
                    for layer in model.model.layers:
                        layer.mlp.down_proj.weight.mul_(-3)
            model.save_pretrained(folder / name)
            self.models[name] = model

    def scores(self, name: str, count: int | None = None) -> list[float]:
        """By transformers."""
        rows = self.rows[:count]
        said = preferred(self.models[name], self.tokenizer, rows)
        return [float(place == row["answer"]) for place, row in zip(said, rows, strict=True)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return Place(tmp_path_factory.mktemp("place"))


def test_a_foreign_checkpoint_is_scored_as_the_gate_scores_the_same_weights(place: Place, tmp_path: Path) -> None:
    shutil.copytree(place.run, tmp_path / "one")  # elsewhere, where nothing was measured yet
    out = tmp_path / "out"
    sources = (tmp_path / "one", place.folder / "foreign", place.folder / "damaged")
    done = run("compare", *sources, "--parent", place.parent, "--task", f"words={place.task}", "--out", out)
    assert done.exit_code == 0, done.output
    found = json.loads((out / "compare.json").read_text())
    names = {"parent": "parent", "one/compressed_tensors": "foreign", "foreign": "foreign", "damaged": "damaged"}
    answers = {row["state"]: row for row in found["tasks"]}
    assert list(answers) == list(names)
    for name, model in names.items():
        scores = place.scores(model)
        assert answers[name]["score"] == sum(scores) / 60, name
        assert name == "parent" or answers[name]["gain"] == pytest.approx(sum(scores) / 60 - 1)
    theirs = {row["state"]: row for row in place.verdict["tasks"]}["compressed_tensors"]
    assert 0.5 < theirs["score"] < 1
    for key in ("metric", "examples", "score", "gain", "gain_low", "gain_high"):
        assert answers["foreign"][key] == answers["one/compressed_tensors"][key] == theirs[key]
    damaged = answers["damaged"]
    assert damaged["score"] < theirs["score"] and damaged["gain_high"] < 0, "certainly worse than the parent"
    assert ["tasks", "words (words.jsonl)"] in found["facts"] and found["notes"] == []
    shown = numbers(out / "compare.html")
    assert {f"/tasks/{n}/{key}" for n in (1, 2, 3) for key in ("score", "gain", "gain_low", "gain_high")} <= shown
    with (out / "compare.csv").open() as f:
        table = {row["state"]: row for row in csv.DictReader(f)}
    for name, row in answers.items():
        assert float(table[name]["accuracy"]) == float(table[name]["tasks.words.score"]) == row["score"]
        assert table[name]["tasks.words.gain_low"] == ("" if name == "parent" else str(row["gain_low"]))
    assert table["one/calibrate"]["tasks.words.score"] == "", "stages between were not asked"
    for words in ("answers ", "against parent", f"{damaged['score']:.2%}"):
        assert words in done.output


def test_all_are_asked_the_same_and_only_once(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files and a task of lm-eval, the first ten examples of each; what the run's own gate asked stays out."""
    prompts = [{"prompt": "a b", "answer": "c", "max_tokens": 2} for _ in range(12)]
    calls = list[tuple[Any, ...]]()

    def score(model: Any, tokenizer: Any, names: Sequence[str], limit: int) -> dict[str, Any]:
        calls.append((names, limit))
        return {"arc": {"metric": "acc", "scores": [1.0, 0.0] * 5}}

    monkeypatch.setattr(_lm_eval, "version", lambda: "0")
    monkeypatch.setattr(_lm_eval, "texts", lambda names: iter(names))
    monkeypatch.setattr(_lm_eval, "score", score)
    asked = ["--task", f"others={place.task}", "--task", f"says={save(tmp_path / 'says.jsonl', prompts)}"]
    asked += ["--lm-eval", "arc", "--limit", 10, "--out", tmp_path / "out", "--quiet"]
    shutil.copytree(place.run, tmp_path / "one")
    sources = (tmp_path / "one", place.folder / "damaged", "--parent", place.parent)
    done = run("compare", *sources, *asked)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "out/compare.json").read_text())
    states = ["parent", "one/compressed_tensors", "damaged"]
    assert [(row["task"], row["state"], row["examples"]) for row in found["tasks"]] == [
        (task, state, 10) for task in ("others", "says", "arc") for state in states
    ]
    assert [row["score"] for row in found["tasks"][:3]] == [
        sum(place.scores(name, 10)) / 10 for name in ("parent", "foreign", "damaged")
    ]
    assert calls == [(["arc"], 10)] * 3
    assert found["notes"] == ["tasks that only one was asked are not shown: words"]
    assert dict(found["facts"])["tasks"] == (
        "others (words.jsonl), says (says.jsonl), arc; at most 10 examples of each"
    )
    for module, name in ((_measure, "measure_many"), (_examples, "score"), (_generate, "score"), (_lm_eval, "score")):
        monkeypatch.setattr(module, name, None)  # the second time nothing is measured
    assert run("compare", *sources, *asked).exit_code == 0
    assert json.loads((tmp_path / "out/compare.json").read_text()) == found


def test_all_that_is_wrong_is_said_before_anything_is_measured(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_measure, "measure_many", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    good, out = place.rows[0], tmp_path / "out"
    (tmp_path / "broken.jsonl").write_text(json.dumps(good) + "\n{'context'\n")
    save(tmp_path / "long.jsonl", [good, good, {"context": "a" * 300, "continuation": " b"}])
    files = ("words.jsonl", "a=", "gone=gone.jsonl", f"folder={tmp_path}", f"x={place.task}", f"x={place.task}")
    files += (f"broken={tmp_path / 'broken.jsonl'}", f"long={tmp_path / 'long.jsonl'}")
    tasks = [word for file in files for word in ("--task", file)]
    more = ("--parent", place.parent, "--lm-eval", "x", "--out", out)
    said = run("compare", place.folder / "foreign", tmp_path / "nothing", *tasks, *more)
    assert said.exit_code == 2 and not out.exists()
    lines = said.output.splitlines()
    for line, words in zip(
        lines,
        (
            "nothing was compared:",
            "nothing does not exist",
            "no text to compare on: give --text",
            "--task words.jsonl: give a name and a file",
            "--task a=: give a name and a file",
            "--task gone: gone.jsonl does not exist",
            f"--task folder: {tmp_path} is no file",
            "two tasks are called x;",
            "--lm-eval needs lm-evaluation-harness",
            f"--task broken: {tmp_path / 'broken.jsonl'} line 2: Expecting property name",
            f"--task long: {tmp_path / 'long.jsonl'} line 3: 302 tokens are more than the model reads (256)",
        ),
        strict=True,
    ):
        assert words in line, said.output
    assert "gate.tasks" not in said.output
    alone = run("compare", place.run, "--task", f"long={tmp_path / 'long.jsonl'}", "--out", out)
    assert alone.exit_code == 2 and len(alone.output.splitlines()) == 2 and "line 3: 302 tokens" in alone.output
    limit = run("compare", place.run, "--limit", 5, "--out", out)
    assert limit.exit_code == 2 and "--limit 5 is of the examples of tasks, and none is given" in limit.output
    assert run("compare", place.run, "--task", f"x={place.task}", "--limit", 0).exit_code == 2
    assert not out.exists()


def test_nothing_is_fetched_for_a_command_that_is_wrong(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "open_parent", None)
    asked = ("--parent", "owner/name", "--text", TEXT, "--task", f"x={place.task}", "--task", "y=gone.jsonl")
    said = run("compare", place.folder / "foreign", *asked, "--out", tmp_path / "out")
    assert said.exit_code == 2 and said.output.splitlines()[1:] == ["  --task y: gone.jsonl does not exist"]


def test_a_parent_that_cannot_be_read_is_one_of_the_faults(place: Place, tmp_path: Path) -> None:
    shutil.copytree(place.parent, tmp_path / "parent")
    (tmp_path / "parent/config.json").write_text("{")
    asked = ("--parent", tmp_path / "parent", "--text", TEXT, "--task", f"x={place.task}", "--limit", 3)
    said = run("compare", place.folder / "foreign", *asked, "--task", "y=gone.jsonl", "--out", tmp_path / "out")
    gone, config = said.output.splitlines()[1:]
    assert said.exit_code == 2 and "y: gone.jsonl" in gone and "config.json is not JSON" in config
    alone = run("compare", place.folder / "foreign", *asked, "--out", tmp_path / "out")
    assert alone.exit_code == 1 and "config.json is not JSON" in alone.output
