"""Two ranks of one launch: the others wait for rank 0, agree with it, and fail when it does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
ROOT = {"parent": {"model.safetensors": "1"}, "calibration": "2", "training": "3", "evaluation": "4"}


SCRIPT = """
import os, sys, time
from pathlib import Path
from qat import plugins
plugins.ROOT = Path.cwd()
from qat.recipe import load
from qat.stages import Run
rank, mode = int(os.environ["RANK"]), sys.argv[1]
def alone(partial):
    time.sleep(0.5)
    assert rank == 0
    if mode == "fail": raise ValueError("no luck with hf_abcdefghijkl")
    if mode == "die": os.kill(os.getpid(), 9)
    (partial / "x").write_text("x")
    return {}
def together(partial):
    (partial / f"rank{rank}").write_text("here")
    while rank == 0 and not (partial / "rank1").exists(): time.sleep(0.01)
    return {}
with Run(load(["recipe=small.yaml", *sys.argv[2:]])) as run:
    if mode == "differ":
        run.stage("train", content={"rank": rank}, work=alone, everyone=True)
        sys.exit()
    one = run.stage("calibrate", content={"machine": rank}, work=alone)
    two = run.stage("train", content={}, parents=[one], work=together, everyone=True)
print(rank, one.reused, sorted(two.manifest["files"]), two.reused)
"""


def launch(folder: Path, mode: str, *overrides: str, port: int) -> list[tuple[int, str, str]]:
    """(exit code, stdout's last line, stderr's last line) of two ranks; rank 1 starts first."""
    started = []
    for rank in (1, 0):
        environment = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
        }
        command = [sys.executable, "-c", textwrap.dedent(SCRIPT), mode, *overrides]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=folder, env=environment, **pipes))
    out = [(*process.communicate(timeout=60), process.returncode) for process in started]
    return [
        (code, *(text.strip().rpartition("\n")[2] for text in (said, wrong))) for said, wrong, code in reversed(out)
    ]


def test_other_ranks_wait_for_rank_0_and_agree_with_it(fake_root: Path) -> None:
    made = launch(fake_root, "work", port=1)
    assert [line for _, line, _ in made] == [f"{rank} False ['rank0', 'rank1'] False" for rank in (0, 1)], made
    again = launch(fake_root, "work", port=1)
    assert [line for _, line, _ in again] == [f"{rank} True ['rank0', 'rank1'] True" for rank in (0, 1)], again
    fresh = launch(fake_root, "work", "fresh=train", port=1)
    assert [line for _, line, _ in fresh] == [f"{rank} True ['rank0', 'rank1'] False" for rank in (0, 1)], fresh


def test_other_ranks_fail_when_rank_0_does(fake_root: Path) -> None:
    (code_0, _, _), (code_1, _, error_1) = launch(fake_root, "fail", port=3)
    assert code_0 == code_1 == 1
    assert error_1 == "qat.ranks.RunError: rank 0 failed: ValueError: no luck with hf_***"
    (code_0, _, _), (code_1, _, error_1) = launch(fake_root, "die", port=4)
    assert code_0 == -signal.SIGKILL and code_1 == 1
    assert "is gone without a word" in error_1
    (_, _, _), (code_1, _, error_1) = launch(fake_root, "differ", port=5)
    assert code_1 == 1 and "the ranks read different recipes or files" in error_1
