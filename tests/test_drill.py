"""The crash drill: micro.yaml killed between and within its file operations, and started again.

What a run that was killed leaves in the end is, byte for byte, what one that nobody disturbed leaves. `results` says
what is compared, `tests/killing.py` how a run is killed; benchmarks/drill.py does the same with the demo.
"""

from __future__ import annotations

import os
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest

from qat.stages import ABANDONED_SECONDS, Run
from tests.killing import Moment, done, drill, finished, leftovers, part_of, results

SEED, BETWEEN, WITHIN, BY_THE_CLOCK = 7, 10, 6, 3
COMMAND = ["recipe=micro.yaml", "compute.device=cpu"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    assert drill(COMMAND, [(folder, [None])]) == {folder: [0]}
    return folder


def moments(log: list[list[Any]]) -> dict[str, tuple[int, Moment]]:
    """name -> (stages that were finished before, moment): the boundaries of each stage, and seeded ones in between."""
    made = [
        i
        for i, (event, path, count, _) in enumerate(log)
        if event == "os.mkdir" and path.endswith(".partial") and count == 1
    ]
    ends = [i for i in range(1, len(log)) if log[i][3] > log[i - 1][3]]
    # around the making of a stage's folder; before its manifest gets its name, before its own renaming, and after it
    edges = {i + by for i in made for by in (0, 1)} | {i - by for i in ends for by in (2, 1, 0)}
    random_ = random.Random(SEED)
    between = random_.sample([i for i in range(len(log)) if i not in edges], BETWEEN)
    named = re.compile(r"\.\w+\.part$")  # a file that gets its name by a rename
    written = [i for i, (e, path, *_) in enumerate(log) if e == "open" or (e == "os.rename" and named.search(path))]
    chosen = [("before", i) for i in [*edges, *between]] + [("torn", i) for i in random_.sample(written, WITHIN)]
    found: dict[str, tuple[int, Moment]] = {}
    for how, index in sorted(chosen, key=lambda one: one[1]):
        event, path, count, finished = log[index]
        start = finished - (index in ends)  # that a stage was finished just now is no state to start from
        found[f"{how} {index}"] = start, [how, event, path, count, finished - start]
    return found


@pytest.mark.slow
def test_a_run_killed_at_any_moment_goes_on_to_the_same_bytes(whole: Path, tmp_path: Path) -> None:
    log, seconds = done(whole)
    stages = finished(log)
    todo: list[tuple[Path, list[Moment]]] = []
    for name, (count, moment) in moments(log).items():
        folder = tmp_path / name
        if count:
            part_of(whole, folder, stages[:count])
        todo.append((folder, [moment, None]))
    assert len(todo) >= 40
    twice = tmp_path / "twice"
    by_chance: list[tuple[Path, list[Moment]]] = [(twice, [seconds * 0.3, seconds * 0.5, None])]
    by_chance += [(tmp_path / f"clock {i}", [seconds * (i + 0.5) / BY_THE_CLOCK, None]) for i in range(BY_THE_CLOCK)]
    codes = drill(COMMAND, [*todo, *by_chance])
    assert [folder.name for folder, _ in todo if codes[folder] != [-9, 0]] == []
    assert [folder.name for folder, _ in by_chance if codes[folder][-1] or set(codes[folder]) - {-9, 0}] == []
    expected = results(whole / "micro")
    assert {name.partition("/")[0] for name in expected if "/" in name} == set(stages) and len(stages) == 5
    for folder in codes:
        found = results(folder / "micro")
        assert found.keys() == expected.keys(), folder.name
        assert [name for name in expected if found[name] != expected[name]] == [], folder.name
        # what others may be writing just now is left for a day
        assert [name for name in leftovers(folder) if not name.startswith(".")] == [], folder.name


def test_torn_files_go_from_the_run_now_and_from_shared_folders_after_a_day(fake_root: Path) -> None:
    from qat.recipe import load

    names = ["small/verdict.json.part12", ".measured/a/0.safetensors.part3", ".parents/micro.part4/config.json"]
    names += [".fingerprints.json.part5", "film.part1", "other/verdict.json.part6"]
    paths = [fake_root / "runs" / name for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("half")
    with Run(load(["recipe=small.yaml"])):
        assert [path.exists() for path in paths] == [False, *[True] * 5]
    before = time.time() - ABANDONED_SECONDS - 1
    for path in (*paths[1:], paths[2].parent):
        os.utime(path, (before, before))
    with Run(load(["recipe=small.yaml"])):
        assert [path.exists() for path in paths] == [False] * 4 + [True] * 2
