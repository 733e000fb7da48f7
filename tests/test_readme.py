"""Every command in the README runs: as it stands, or with the micro model and short texts in place of what takes long.

COMMANDS says of each how. A command that this table does not know is a failure, and so is one that the README no longer
has. What takes minutes (`make`) is run by .ci/run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer
from typer.testing import CliRunner

from gate import _examples
from qat.cli import app
from qat.micro import make_micro
from qat.plugins import ROOT
from qat.recipe import RecipeError, load

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PREFIX = ("make ", ".venv/bin/", "pip ")
# the numbers of micro.yaml, for recipes of other sizes
UNGATED = ["scheme.weights.group_size=64", "compute.device=cpu", "output=runs"]
SMALL = [*UNGATED, "gate={perplexity: {}, divergence: {}, lint: {}, statistics: {max_parent_perplexity: 1.0e+4}}"]
SMALL += ["variants={}", "train.batch=2", "train.length=32"]


def commands() -> list[str]:
    """The commands of all blocks, a line each, without comments."""
    lines = [line for _, block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
    return [" ".join(line.partition("  #")[0].split()) for line in lines if line.startswith(PREFIX)]


class Place:
    """A folder with a model and short texts, in which commands are given; `run` is the last run that one made."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, make_micro(folder / "model")
        self.texts: list[str] = []
        for part in ("calibration", "training", "evaluation"):
            text = (ROOT / f"recipes/demo/text/{part}.txt").read_text(encoding="utf-8")
            (folder / f"{part}.txt").write_text(text[:20000], encoding="utf-8")
            sizes = "" if part == "training" else ", sequences: 4, length: 32"
            self.texts.append(f"data.{part}={{source: {part}.txt{sizes}}}")
        (folder / "capitals.jsonl").write_text('{"context": "a", "choices": [" b", " c"], "answer": 0}\n')

    def tare(self, *words: str, codes: tuple[int, ...] = (0,)) -> str:
        done = CliRunner().invoke(app, [word for word in words if word])
        assert done.exit_code in codes, (words, done.output, done.exception)
        return done.output

    def recipe(self, command: str, replaced: str = "", by: str = "", small: list[str] = SMALL) -> str:
        """Give a command with a recipe as it stands, then what makes it small."""
        words = shlex.split(command.replace(" [dotted.key=value ...]", " train.steps=3").replace(replaced, by))
        assert words[0] == ".venv/bin/tare"
        given = {word.partition("=")[0] for word in words}
        more = [f"model.source={self.model}", *self.texts, *small]
        return self.tare(*words[1:], *(word for word in more if word.partition("=")[0] not in given))


def plan(place: Place, command: str) -> None:
    assert "calibrate" in place.recipe(command)


def run(place: Place, command: str) -> None:
    place.recipe(command, "PATH_OR_HUB_ID", str(place.model))
    stem = re.search(r"recipe=(\w+)\.yaml", command)
    assert stem and (place.folder / f"runs/{stem[1]}/summary.json").exists()


def sensitivity(place: Place, command: str) -> None:
    place.recipe(command, small=UNGATED)
    assert yaml.safe_load((place.folder / "mixed.yaml").read_text())["scheme"]["overrides"]


def mixed(place: Place, command: str) -> None:
    place.tare(*shlex.split(command)[1:], codes=(3,))  # the demo's bounds, on a random model


def compare(place: Place, command: str) -> None:
    for option in ("--parent", "--text", "--task NAME=FILE.jsonl", "--limit", "--out"):
        assert option in command
    asked = ("--task", "capitals=capitals.jsonl", "--limit", "1")
    said = place.tare("compare", "runs/demo", str(release(place)), *asked, "--device", "cpu", "--out", "compared")
    assert "capitals" in said and (place.folder / "compared/compare.html").exists()


def verify(place: Place, command: str) -> None:
    place.tare("verify", str(release(place)), "runs/demo")


def lint(place: Place, command: str) -> None:
    words = shlex.split(command.replace("DIRECTORY", str(release(place))))
    assert "4 ranks" in place.tare(*words[1:], codes=(0, 1)), "two key-value heads go to four ranks"
    assert "--headers" in README and "trtllm" in README
    place.tare(*words[1:-2], "--headers")


def serve(place: Place, command: str) -> None:
    program = place.folder / "bin/vllm"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\necho "$@" > served\n')
    program.chmod(0o755)
    words = shlex.split(command.replace("RELEASE", str(release(place))).replace("[", "").replace("]", ""))
    child = os.fork()  # the command becomes the server
    if not child:
        os.environ["PATH"] = f"{program.parent}:{os.environ['PATH']}"
        app(words[1:], standalone_mode=False)
    assert os.waitpid(child, 0)[1] == 0
    assert "--port 9000" in (release(place) / "served").read_text()


def release(place: Place) -> Path:
    return next((place.folder / "runs/demo").glob("release-*/*/config.json")).parent


def push(place: Place, command: str) -> None:
    """The dry run: no test reaches a hub."""
    assert "[--dry-run]" in command
    assert "model.safetensors" in place.tare("push", str(release(place)), "owner/name", "--dry-run")


def recovery(place: Place, command: str) -> None:
    """Hours, and a model that is fetched: its recipe is read with other texts, its methods are known."""
    words = shlex.split(command)[2:]
    methods = next(word for word in words if word.startswith("methods="))
    words = [re.sub(r"=[\w.-]+\.gguf$", f"={place.model}", word) for word in words if word != methods]
    words = [re.sub(r"^(data\.(\w+)\.source)=.*", r"\1=\2.txt", word) for word in words]
    load(words)
    known = (ROOT / "benchmarks/recovery.py").read_text(encoding="utf-8")
    assert [name for name in methods.partition("=")[2].split(",") if f'"{name}":' not in known] == []


def make(place: Place, command: str) -> None:
    """Run by .ci/run; here make only says what it would do."""
    assert command in (ROOT / ".ci/run").read_text(encoding="utf-8")
    can_be_made(command)


COMMANDS: dict[str, Callable[[Place, str], None]] = {
    "make demo": make,
    "make test": make,
    ".venv/bin/tare plan recipe=demo.yaml train.steps=50": plan,
    ".venv/bin/tare run recipe=demo.yaml train.steps=50": run,
    ".venv/bin/tare run recipe=int4_awq.yaml model.source=PATH_OR_HUB_ID [dotted.key=value ...]": run,
    ".venv/bin/tare sensitivity recipe=demo.yaml": sensitivity,
    ".venv/bin/tare run recipe=mixed.yaml": mixed,
    ".venv/bin/tare compare RUN_OR_DIR ...": compare,
    ".venv/bin/tare verify DIR ...": verify,
    ".venv/bin/python benchmarks/recovery.py recipe=smollm2_int4.yaml": recovery,
    ".venv/bin/tare lint DIRECTORY": lint,
    ".venv/bin/tare push RELEASE_DIR OWNER/NAME": push,
    ".venv/bin/tare serve RELEASE": serve,
}


def how(command: str) -> list[str]:
    return [known for known in COMMANDS if command == known or command.startswith(f"{known} ")]


def test_the_table_knows_every_command_of_the_readme() -> None:
    assert [command for command in commands() if len(how(command)) != 1] == []
    assert [known for known in COMMANDS if not any(known in how(command) for command in commands())] == []


@pytest.mark.slow
def test_every_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TARE_LOG", "")
    place = Place(tmp_path)
    for command in commands():
        (known,) = how(command)
        COMMANDS[known](place, command)


def can_be_made(command: str) -> None:
    done = subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_targets_and_commands_named_in_the_text_exist() -> None:
    targets, names = set(re.findall(r"`(make [a-z]+)`", README)), set(re.findall(r"`tare ([a-z]+)[^`]*`", README))
    assert {"make demo", "make test", "make engines", "make interop"} <= targets
    for target in targets:
        can_be_made(target)
    assert names and names <= {command.name or command.callback.__name__ for command in app.registered_commands}  # type: ignore[union-attr]
    said = CliRunner().invoke(app, ["run", "--help"]).output
    assert [
        option for option in ("--no-progress", "--quiet", "--json") if option not in said or option not in README
    ] == []


def test_the_gate_section_of_the_readme_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("capitals.jsonl").write_text("{}")
    (block,) = (block for language, block in BLOCKS if language == "yaml")
    gate = yaml.safe_load(block)["gate"]
    assert set(load(["recipe=micro.yaml", f"gate={json.dumps(gate)}"]).gate or {}) == set(gate)


def test_every_kind_of_example_is_read_as_the_readme_shows(tmp_path: Path) -> None:
    (block,) = (block for language, block in BLOCKS if language == "json")
    path = tmp_path / "task.jsonl"
    rows = [json.loads(line) for line in block.splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(make_micro(tmp_path / "micro"))
    for row in rows:
        path.write_text(json.dumps(row))
        (found,) = _examples.read(path, tokenizer, None, None)
        assert isinstance(found, _examples.Prompt if "prompt" in row else _examples.Example)
    kinds = [{"context", "choices", "answer"}, {"context", "continuation"}]
    assert [set(row) for row in rows] == [*kinds, {"prompt", "answer", "match", "max_tokens", "stop"}]


def test_mistakes_are_reported_as_the_readme_shows() -> None:
    (block,) = (block for _, block in BLOCKS if "is not a valid recipe" in block)
    with pytest.raises(RecipeError) as caught:
        load(["recipe=micro.yaml", "scheme.weights.group_sise=32", "train.steps=ten"])
    for line in block.strip().splitlines():
        assert line.partition(" (known")[0] in str(caught.value)
