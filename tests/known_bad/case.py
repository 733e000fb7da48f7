"""One fault: how to make it, who must catch it, and what is said then; runs of recipes/micro.yaml with short texts.

`python benchmarks/known_bad.py` makes the table of all of them from the outcome of these tests.
"""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from qat import manifest, plan
from qat.micro import make_micro
from qat.plugins import ROOT
from qat.train import main

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TEXTS = {"calibration": 6000, "training": 12000, "evaluation": 6000}  # letters of the demo's texts that are enough
UP = "model.layers.1.mlp.up_proj.weight"
AFTER = ("verdict.json", "report.html", "report.json", "junit.xml", "summary.md")  # of the last run only
Note = Callable[..., None]  # (fault, caught by, what was said, refused=True): a line of the table
Spoil = Callable[["Place"], Sequence[str] | None]


@dataclass(frozen=True)
class Case:
    """A fault and what must come of it.

    caught_by: who says so. spoil: makes it, and gives what is to be added to the command line. says: pieces of the
    error, in order: thing, value, rule, way out. code: the exit code. good: for what is handled rather than refused
    (code 0): checks what the run left, and says it.
    """

    fault: str
    caught_by: str
    spoil: Spoil
    says: tuple[str, ...] = ()
    code: int = 1
    good: Callable[[Place], str] | None = None


class Place:
    """A folder with a model, three texts and the output of an earlier run that was released.

    model: the random micro model, to be spoiled. runs: output folder.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.model, self.runs = root, root / "model", root / "runs"

    @classmethod
    def new(cls, root: Path) -> Place:
        """With everything but the earlier run."""
        make_micro(root / "model")
        for part, size in TEXTS.items():
            text = (ROOT / f"recipes/demo/text/{part}.txt").read_text(encoding="utf-8")
            (root / f"{part}.txt").write_text(text[:size], encoding="utf-8")
        return cls(root)

    @property
    def run(self) -> Path:
        return self.runs / "micro"

    def text(self, part: str) -> Path:
        return self.root / f"{part}.txt"

    def command(self, *more: str) -> list[str]:
        """A command line that ends well until something is spoiled; `more` replaces what has the same key."""
        texts = [f"data.{part}.source={self.text(part)}" for part in TEXTS]
        base = ["recipe=micro.yaml", f"output={self.runs}", f"model.source={self.model}", "compute.device=cpu", *texts]
        return list({argument.partition("=")[0]: argument for argument in [*base, *more]}.values())

    def start(self, *more: str) -> int:
        return main(self.command(*more))

    def stage(self, name: str) -> Path:
        """The newest finished folder of a stage."""
        found = [path for path in self.run.glob(f"{name}-*") if path.suffix != ".partial"]
        return max(found, key=lambda path: path.stat().st_ctime_ns)

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.run / "summary.json").read_text())

    def files(self, below: Path) -> dict[str, bytes]:
        """All bytes below a folder, but for what every run rewrites."""
        found = (path for path in below.rglob("*") if path.is_file() and path.name not in ("summary.json", ".lock"))
        return {path.relative_to(below).as_posix(): path.read_bytes() for path in found}


def check(case: Case, place: Place, capsys: pytest.CaptureFixture[str], note: Note) -> None:
    """Spoil, run, and hold what happened against the case."""
    more = [str(argument) for argument in case.spoil(place) or ()]
    model, before, released = place.files(place.model), place.files(place.run), place.summary["last_released"]
    with suppress(ValueError, OSError):  # a plan may refuse as well, but not break
        plan.main(place.command(*more))
    capsys.readouterr()
    code = place.start(*more)
    error = capsys.readouterr().err
    assert code == case.code, error
    if case.good is None:
        assert "Traceback" not in error
        place_of = 0
        for piece in case.says:
            assert piece in error[place_of:], (piece, error)
            place_of = error.index(piece, place_of) + len(piece)
        assert place.summary["status"] == "failed" and case.says[0] in place.summary["error"]
        assert place.summary["last_released"] == released
        note(case.fault, case.caught_by, shown(error, place))
    else:
        assert error == "" and place.summary["status"] in ("released", "ungated")
        note(case.fault, case.caught_by, case.good(place), refused=False)
    assert place.files(place.model) == model
    intact(place, before, case.good is None)


def intact(place: Place, before: dict[str, bytes], failed: bool) -> None:
    """The earlier run's files are as they were, and what is new is whole or marked as work in progress."""
    after = place.files(place.run)
    for name, content in before.items():
        if name not in AFTER:
            assert after[name] == content, name
    shown = [name for name in AFTER if name in after]
    if failed and place.summary["status"] == "released":  # nothing can be written there, perhaps not even removed
        assert shown == [] or all(after[name] == before[name] for name in AFTER)
    elif failed:  # nothing of the earlier run says that it was released
        assert shown == ["junit.xml", "summary.md"]
        (case,) = ElementTree.fromstring(after["junit.xml"]).iter("testcase")
        assert case.find("error") is not None and after["summary.md"].startswith("## ❌ micro: failed\n".encode())
    assert (place.run / str(place.summary["last_released"])).is_dir()
    assert [p for p in place.root.rglob("*.part*") if not p.name.endswith(".partial")] == []
    for name in sorted({name.split("/")[0] for name in after.keys() - before.keys() if "/" in name}):
        if not name.endswith(".partial"):
            assert not (failed and name.startswith("release-")), name
            said = manifest.read(place.run / name)
            assert said is not None and manifest.altered(place.run / name, said) is None, name


def shown(error: str, place: Place) -> str:
    """An error as the table shows it: one line without folders and numbers of this machine and moment."""
    error = error.replace(f"{place.root}/", "").replace(f"{ROOT}/", "")
    error = re.sub(r"(\.part|\]:|process )\d+", r"\1N", error)
    return " ".join(re.sub(r"-[0-9a-f]{12}\b", "-KEY", error).split())


# what spoils a model


def tensors(change: Callable[[dict[str, Tensor]], Any]) -> Spoil:
    """Change the tensors of the model's file."""

    def spoil(place: Place) -> None:
        found = load_file(place.model / WEIGHTS)
        change(found)
        save_file({k: v.contiguous() for k, v in found.items()}, place.model / WEIGHTS, metadata={"format": "pt"})

    return spoil


def put(name: str, value: float, at: int = 3) -> Spoil:
    """Put one value into a tensor."""

    def change(found: dict[str, Tensor]) -> None:
        found[name].view(-1)[at] = value

    return tensors(change)


def config(**fields: Any) -> Spoil:
    def spoil(place: Place) -> None:
        path = place.model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return spoil


def file(name: str, content: str | bytes | None) -> Spoil:
    """Give a file of the model other content; None removes it."""

    def spoil(place: Place) -> None:
        path = place.model / name
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content.encode() if isinstance(content, str) else content)

    return spoil


def given(*arguments: str) -> Spoil:
    """Nothing is spoiled, this is asked for."""
    return lambda place: arguments


def both(*spoils: Spoil) -> Spoil:
    return lambda place: [argument for spoil in spoils for argument in spoil(place) or ()]


def sharded(change: Callable[[dict[str, str]], Any] = lambda index: None) -> Spoil:
    """Cut the model's file in two, with an index that `change` may change."""

    def spoil(place: Place) -> None:
        found = load_file(place.model / WEIGHTS)
        (place.model / WEIGHTS).unlink()
        index = {}
        for number in (1, 2):
            part = {key: found[key] for key in sorted(found)[number - 1 :: 2]}
            save_file(part, place.model / shard(number), metadata={"format": "pt"})
            index |= dict.fromkeys(part, shard(number))
        change(index)
        (place.model / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))

    return spoil


def shard(number: int) -> str:
    return f"model-0000{number}-of-00002.safetensors"


def copy(source: str, target: str) -> Spoil:
    """A file of the model under a second name."""

    def spoil(place: Place) -> None:
        shutil.copy(place.model / source, place.model / target)

    return spoil
