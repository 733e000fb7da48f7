"""Processes that are killed, and processes that work together: the exported bytes do not show it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from qat.plugins import ROOT
from tests.killing import Moment, done, drill, results

COMMAND = ["recipe=micro.yaml", "gate=null", "train.steps=4", "compute.device=cpu"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("undisturbed") / "out"
    drill(COMMAND, [(output, [None])])
    return output / "micro"


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
def test_a_killed_calibration_goes_on_to_the_same_bytes(tmp_path: Path, methods: tuple[str, ...]) -> None:
    command, whole = [*COMMAND, *methods, "until=calibrate"], tmp_path / "whole"
    drill(command, [(whole, [None])])
    log = [step for step in done(whole)[0] if "/calibrate-" in step[1] and step[0] != "fsync"]
    points = [log[i] for i in sorted({0, *range(1, len(log), len(log) // 5), len(log) - 1})]
    todo: list[tuple[Path, list[Moment]]] = [
        (tmp_path / f"at {i}", [["before", *step], None]) for i, step in enumerate(points)
    ]
    assert set(map(tuple, drill(command, todo).values())) == {(-9, 0)}
    expected = results(whole / "micro")
    assert any("block-00001.safetensors" in name for name in expected)
    for folder, _ in todo:
        assert results(folder / "micro") == expected, folder


@pytest.mark.slow
def test_two_ranks_train_what_one_trains_and_speak_once(undisturbed: Path, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "qat/train.py"]
    command = [*launch, *COMMAND, f"output={tmp_path}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TARE_PROGRESS": "0", "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    lines = [line.rstrip() for line in ran.stdout.splitlines() if line.strip()]
    assert len(lines) == len(set(lines)) and "status: ungated" in lines, ran.stdout
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
