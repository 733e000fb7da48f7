"""What happens to a run's folder, its disk, memory, clock and processes: the run says so, and earlier results stay."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from qat.plugins import ROOT
from qat.recipe import load
from qat.stages import Run
from qat.train import main
from tests.known_bad.case import Note, Place, intact, shown

OTHER_GROUPS = "scheme.weights.group_size=64"  # a calibration that the earlier run did not make


@contextmanager
def limited(kind: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


@pytest.mark.parametrize(
    ("at", "file_bytes", "change"),
    [
        ("the run's first file", 100, OTHER_GROUPS),
        ("the artifact", 20_000, OTHER_GROUPS),
        ("the export", 100_000, "export.formats=[awq]"),
    ],
)
def test_a_full_disk(
    place: Place, capsys: pytest.CaptureFixture[str], note: Note, at: str, file_bytes: int, change: str
) -> None:
    """The kernel refuses to write any file beyond a size: by every library, at any point of a write."""
    before, summary = place.files(place.run), place.summary
    with limited(resource.RLIMIT_FSIZE, file_bytes):
        assert place.start(change) == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error and len(error.splitlines()) == 1
    assert "File too large: '" in error and str(place.runs) in error and "free some disk or set output=FOLDER" in error
    # where not even the summary can be written, the old one stands and the exit code says it
    assert place.summary == summary if file_bytes == 100 else place.summary["status"] == "failed"
    intact(place, before, failed=True)
    note(f"disk full while {at} is written", "run", shown(error, place))
    assert place.start(change) == 0  # there is room again


def test_a_disk_that_is_full_when_the_micro_model_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], note: Note
) -> None:
    command = ["recipe=micro.yaml", f"output={tmp_path}", "compute.device=cpu"]
    with limited(resource.RLIMIT_FSIZE, 50_000):
        assert main(command) == 1
    error = capsys.readouterr().err
    (said,) = [line for line in error.splitlines() if "Error" in line]
    assert "Traceback" not in error and "File too large: '" in said and "free some disk or set output=FOLDER" in said
    assert "File too large" in json.loads((tmp_path / "micro/summary.json").read_text())["error"]
    note("disk full while the micro model is made", "run", said.replace(f"{tmp_path}/", ""))


def test_ctrl_c(place: Place, capsys: pytest.CaptureFixture[str], note: Note, monkeypatch: pytest.MonkeyPatch) -> None:
    before = place.files(place.run)

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("calibrate.observe.run", stop)
        assert place.start(OTHER_GROUPS) == 130
    assert capsys.readouterr().err == "stopped; the same command goes on where it was\n"
    assert place.summary["status"] == "failed" and place.summary["error"] == "interrupted"
    intact(place, before, failed=True)
    assert place.start(OTHER_GROUPS, "until=calibrate") == 0
    note("Ctrl-C", "run", "stopped; the same command goes on where it was")


def test_no_memory(place: Place, capsys: pytest.CaptureFixture[str], note: Note) -> None:
    before = place.files(place.run)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    with limited(resource.RLIMIT_AS, now + 64 * 2**20):
        assert place.start("train.batch=2000", "train.length=64", "train.steps=1") == 1
    error = capsys.readouterr().err
    assert "Traceback" not in error and len(error.splitlines()) == 1
    assert "out of memory: lower train.micro_batch" in error and "what is finished is kept" in error
    assert place.summary["status"] == "failed" and "out of memory" in place.summary["error"]
    intact(place, before, failed=True)
    note("no memory", "run", shown(error, place))


def test_a_read_only_run_folder(place: Place, capsys: pytest.CaptureFixture[str], note: Note) -> None:
    before, summary = place.files(place.run), place.summary
    for path in [place.root, *place.root.parents]:  # so that another user comes this far
        if path.stat().st_uid == os.getuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o555)
    for path in [place.run, *place.run.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    is_root = os.geteuid() == 0  # whom no mode stops
    if is_root:
        os.seteuid(65534)
    try:
        assert place.start("export.formats=[awq]") == 1
    finally:
        if is_root:
            os.seteuid(0)
    error = capsys.readouterr().err
    assert "PermissionError" in error and str(place.run) in error and "or set output=FOLDER elsewhere" in error
    assert len(error.splitlines()) == 1 and place.summary == summary and place.files(place.run) == before
    place.run.chmod(0o755)  # pytest removes it
    note("a read-only run folder", "run", shown(error, place))


def test_two_runs_in_one_folder(place: Place, capsys: pytest.CaptureFixture[str], note: Note) -> None:
    with Run(load(place.command())):
        before, summary = place.files(place.run), place.summary
        assert place.start("export.formats=[awq]") == 1
        error = capsys.readouterr().err
        assert f"micro is in use by process {os.getpid()}" in error and "name=..." in error
        assert place.summary == summary and place.files(place.run) == before
    note("two runs in one folder at once", "run", shown(error, place))


def test_a_clock_that_goes_backwards(place: Place, note: Note, monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour at every look, and inputs that were written tomorrow."""
    start, looks = time.time(), iter(range(1, 10**6))
    monkeypatch.setattr(time, "time", lambda: start - 3600 * next(looks))
    for path in [*place.model.iterdir(), *place.root.glob("*.txt")]:
        os.utime(path, (start + 86400, start + 86400))
    assert place.start("train=null", "export.formats=[awq]") == 0
    made = place.summary["stages"]
    assert place.summary["status"] == "released" and any(not stage["reused"] for stage in made)
    assert all(stage["seconds"] >= 0 for stage in made)
    assert place.start("train=null", "export.formats=[awq]") == 0
    assert all(stage["reused"] for stage in place.summary["stages"])
    note("a clock that goes backwards", "run", "released; the same command again reuses every stage", refused=False)


MEMORIES = {  # what a run looks up, and what it is called in the table
    "summary.json": "micro/summary.json",
    "the memory of fingerprints": ".fingerprints.json",
    "remembered measurements": ".measured/measure-*.json",
    "remembered faults": ".measured/lint-*.json",
    "remembered hidden states": ".measured/*/*.safetensors",
}


@pytest.mark.parametrize("content", [b"", b"[]"], ids=["empty", "of another kind"])
def test_memories_that_a_power_cut_left(
    place: Place, capsys: pytest.CaptureFixture[str], note: Note, content: bytes
) -> None:
    before = place.files(place.run)
    for pattern in MEMORIES.values():
        # fingerprints of files this young are not kept
        paths = list(place.runs.glob(pattern)) if "*" in pattern else [place.runs / pattern]
        assert paths, pattern
        for path in paths:
            path.write_bytes(content)
    assert place.start("fresh=gate") == 0
    assert capsys.readouterr().err == "" and place.summary["status"] == "released"
    after = place.files(place.run)
    stages = [name for name in before if "/" in name and not name.startswith("gate-") and "manifest.json" not in name]
    assert [name for name in stages if after[name] != before[name]] == []
    torn = "empty" if not content else "of another kind"
    note(
        f"{', '.join(MEMORIES)} {torn} after a power cut",
        "run",
        "released; made again, exports of the same bytes",
        False,
    )


@pytest.mark.parametrize("what", ["a manifest", "a block of an unfinished stage"])
def test_a_stage_that_a_power_cut_left(place: Place, capsys: pytest.CaptureFixture[str], note: Note, what: str) -> None:
    before, folder = place.files(place.run), place.stage("calibrate")
    if what == "a manifest":
        (folder / "manifest.json").write_bytes(b"")
    else:
        (folder / "manifest.json").unlink()
        (folder.rename(f"{folder}.partial") / "block-00001.safetensors").write_bytes(b"")
    assert place.start("until=calibrate") == 0
    assert capsys.readouterr().err == "" and place.summary["stages"][0]["reused"] is False
    after = place.files(place.run)
    assert [name for name in before if name.endswith(".safetensors") and after[name] != before[name]] == []
    note(f"{what} empty after a power cut", "run", "made again, the same bytes", refused=False)


def test_an_output_that_is_a_file(place: Place, capsys: pytest.CaptureFixture[str], note: Note) -> None:
    taken = place.root / "taken"
    taken.write_text("mine")
    assert place.start(f"output={taken}") == 1
    error = capsys.readouterr().err
    assert (
        "NotADirectoryError" in error
        and str(taken) in error
        and "set output=FOLDER elsewhere" in error
        and taken.read_text() == "mine"
    )
    note("an output folder that is a file", "run", shown(error, place))


RANK = """
import os, sys
import calibrate.observe
from qat.train import main
real = calibrate.observe._Runner.quantize
def quantize(runner, index, streams):
    if os.environ["RANK"] == "1" and index == 1:
        os.kill(os.getpid(), 9)
    return real(runner, index, streams)
calibrate.observe._Runner.quantize = quantize
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_worker_rank_that_is_killed(place: Place, note: Note) -> None:
    before, started = place.files(place.run), []
    for rank in ("1", "0"):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
        environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(20000 + os.getpid() % 10000)}
        command = [sys.executable, "-c", RANK, *place.command(OTHER_GROUPS)]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=environment, **pipes))
    (_, lost), (_, error) = (process.communicate(timeout=120) for process in started)
    assert [process.returncode for process in started] == [-9, 1], (lost, error)
    said = [line for line in error.splitlines() if "another process of this launch is gone" in line]
    assert len(said) == 1 and "Traceback" not in error and "what is finished is kept" in said[0], error
    assert place.summary["status"] == "failed" and "launch is gone" in place.summary["error"]
    intact(place, before, failed=True)
    (partial,) = place.run.glob("calibrate-*.partial")
    assert (partial / "block-00000.safetensors").exists()
    assert place.start(OTHER_GROUPS, "until=calibrate") == 0  # one process goes on with the second block
    made = json.loads((place.stage("calibrate") / "manifest.json").read_text())
    assert made["metrics"]["blocks_reused"] == 1
    note("a worker rank that is killed", "run", shown(said[0], place))


def test_a_key_given_twice_on_the_command_line(place: Place, capsys: pytest.CaptureFixture[str], note: Note) -> None:
    before = place.files(place.run)
    assert main([*place.command(), "train.steps=4", "train.steps=5"]) == 2
    error = capsys.readouterr().err
    assert "train.steps=4 has no effect, as train.steps=5 comes after it; give one of them" in error
    assert main([*place.command(), "train.steps=4", "train=null"]) == 2
    assert "train.steps=4 has no effect, as train=null comes after it" in capsys.readouterr().err
    assert place.summary["status"] == "failed"
    intact(place, before, failed=True)
    note("a key given twice on the command line", "recipe", shown(error, place))


@pytest.mark.parametrize(
    ("fault", "text", "says"),
    [
        (
            "a key given twice in a recipe",
            "model: {source: micro}\nmodel: {source: demo}\n",
            "'model' stands twice, in line 1",
        ),
        ("a recipe that is no YAML", "model: {source: micro\n", "not YAML: while parsing"),
        ("a recipe that is a list", "- model\n", "holds a list, not a mapping of sections"),
        ("a name that leads out of the output folder", "name: ../elsewhere\n", "name: string should match pattern"),
    ],
)
def test_a_recipe_that_is_no_good(
    place: Place, capsys: pytest.CaptureFixture[str], note: Note, fault: str, text: str, says: str
) -> None:
    (place.root / "bad.yaml").write_text(text)
    files = {path for path in place.root.rglob("*")}
    assert main([f"recipe={place.root / 'bad.yaml'}", f"output={place.runs}"]) == 2
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error and {path for path in place.root.rglob("*")} == files
    note(fault, "recipe", shown(error, place))
