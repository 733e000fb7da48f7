"""Processes that are killed, and processes that work together: the exported bytes do not show it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from qat.plugins import ROOT

# One process imports everything, then forks a child for each kill, which saves five seconds each. A child counts the
# file operations of Python below the partial folder of a stage, and kills itself (SIGKILL) before the n-th.
KILLER = """
import json, os, signal, sys
import accelerate
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from qat.train import main

stage, points, *command = json.loads(sys.argv[1])
EVENTS = {"os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir", "open"}


def run(folder, kill_at):
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    count = 0

    def count_events(event, args):
        nonlocal count
        path = os.fsdecode(args[0]) if event in EVENTS and isinstance(args[0], str | bytes | os.PathLike) else ""
        if f"/{stage}-" in path and ".partial" in path:
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count_events)
    code = main([*command, f"output={folder}"])
    print("EVENTS", count, flush=True)
    os._exit(code)


for folder, kill_at in points:
    print("STATUS", *(run(folder, at) for at in ([kill_at, None] if kill_at else [None])), flush=True)
"""
COMMAND = ["recipe=micro.yaml", "gate=null", "train.steps=4", "compute.device=cpu"]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TARE_PROGRESS": "0", "HF_HUB_OFFLINE": "1"}


def killer(text: Path, stage: str, points: list[tuple[Path, int | None]], extra: tuple[str, ...] = ()) -> str:
    said = [stage, [(str(folder), at) for folder, at in points], *COMMAND, f"data.training.source={text}", *extra]
    command = [sys.executable, "-c", KILLER, json.dumps(said)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def results(run: Path) -> dict[str, bytes]:
    """Every byte that a stage made, manifests (which hold times) and the table of seconds apart."""
    stages = ("calibrate", "train", "export")
    paths = [path for stage in stages for path in run.glob(f"{stage}-*/**/*") if path.is_file()]
    return {str(p.relative_to(run)): p.read_bytes() for p in paths if p.name not in ("manifest.json", "seconds.csv")}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training text that is tokenized in no time."""
    path = tmp_path_factory.mktemp("text") / "training.txt"
    path.write_text((ROOT / "recipes/demo/text/training.txt").read_text(encoding="utf-8")[:20000], encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    output = tmp_path_factory.mktemp("undisturbed")
    killer(text, "train", [(output, None)])
    return output / "micro"


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "before"), [("train", {"train", "export"}), ("export", {"export"})])
def test_a_killed_run_goes_on_to_the_same_bytes(
    undisturbed: Path, text: Path, tmp_path: Path, stage: str, before: set[str]
) -> None:
    def fresh(name: str) -> Path:
        """The output folder of a run that is finished up to `stage`."""
        unmade = shutil.ignore_patterns(*(f"{name}-*" for name in before), "summary.json", ".fingerprints.json")
        shutil.copytree(undisturbed.parent, tmp_path / name, ignore=unmade)
        return tmp_path / name

    said = killer(text, stage, [(fresh("count"), None)])
    total = int(said.split("EVENTS ")[1].split()[0])
    assert total >= 10, said
    # the first and the last operations (the manifest, the renaming of the finished folder), and some between
    points = sorted({1, *range(3, total, total // 5), total - 1, total})
    folders = {at: fresh(f"at{at}") for at in points}
    said = killer(text, stage, [(folder, at) for at, folder in folders.items()])
    statuses = [line.split()[1:] for line in said.splitlines() if line.startswith("STATUS")]
    assert statuses == [["9", "0"]] * len(points), said
    expected = results(undisturbed)
    assert any(name.startswith("export-") for name in expected)
    for at, folder in folders.items():
        assert results(folder / "micro") == expected, at
        assert not list(folder.rglob("*.part*")), at
        status = json.loads((folder / "micro" / "summary.json").read_text())
        assert status["status"] == "ungated"


@pytest.mark.slow
@pytest.mark.parametrize(
    "methods",
    [
        ("calibrate.transform=awq", "calibrate.round=gptq"),
        ("calibrate.round={name: learned, steps: 3}", "compute.activation_gb=1.0e-9"),
        ("calibrate.range=kl",),
    ],
    ids=["awq gptq", "learned, states on disk", "kl"],
)
def test_a_killed_calibration_goes_on_to_the_same_bytes(text: Path, tmp_path: Path, methods: tuple[str, ...]) -> None:
    extra = (*methods, "until=calibrate")
    said = killer(text, "calibrate", [(tmp_path / "whole", None)], extra)
    total = int(said.split("EVENTS ")[1].split()[0])
    points = sorted({1, *range(2, total, total // 5), total})
    said = killer(text, "calibrate", [(tmp_path / f"at{at}", at) for at in points], extra)
    statuses = [line.split()[1:] for line in said.splitlines() if line.startswith("STATUS")]
    assert statuses == [["9", "0"]] * len(points), said
    expected = results(tmp_path / "whole" / "micro")
    assert any("block-00001.safetensors" in name for name in expected)
    for at in points:
        assert results(tmp_path / f"at{at}" / "micro") == expected, at


@pytest.mark.slow
def test_two_ranks_train_what_one_trains_and_speak_once(undisturbed: Path, text: Path, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "qat/train.py"]
    command = [*launch, *COMMAND, f"data.training.source={text}", f"output={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.rstrip() for line in done.stdout.splitlines() if line.strip()]
    assert len(lines) == len(set(lines)) and "status: ungated" in lines, done.stdout
    assert [line for line in lines if line.startswith("train-")] != []

    def metrics(run: Path) -> dict[str, Any]:
        made = json.loads(next(run.glob("train-*/manifest.json")).read_text())
        return made["metrics"]

    two, one = metrics(tmp_path / "micro"), metrics(undisturbed)
    assert (two["ranks"], one["ranks"]) == (2, 1)
    assert two["loss"] == pytest.approx(one["loss"], rel=2e-3)
    assert two["kl_start"] == pytest.approx(one["kl_start"], rel=1e-5)
    assert two["kl_end"] == pytest.approx(one["kl_end"], rel=2e-2) and two["kl_end"] < two["kl_start"]
    ours, theirs = (load_file(next(r.glob("train-*/overlay.safetensors"))) for r in (tmp_path / "micro", undisturbed))
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        # a step of Adam follows the sign of a gradient, which for a few numbers is next to nothing
        apart = (value - theirs[name]).abs() > 2**-7 * theirs[name].abs().clamp_min(1e-3)
        assert apart.float().mean() < 0.05, name
