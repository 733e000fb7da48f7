"""Runs that are killed at chosen moments, and what is left of them.

One process imports everything, then forks a child for each attempt, which saves five seconds each. A child counts its
file operations below the output folder. A moment is [how, operation, path, count, stages]: the count-th time of that
operation on that path since the attempt finished that many stages, `before` it, or `torn`: a file that is about to get
its name has half its bytes, one that is about to be written is empty. Or it is a number of seconds. What a process has
written outlives a SIGKILL, so what counts the operations leaves no trace on the disk.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from qat.plugins import ROOT

Moment = list[Any] | float | None
SERVER = r"""
import collections, json, os, re, signal, sys, time
import accelerate, transformers.models.llama.modeling_llama
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from qat.train import main

EVENTS = {"open", "os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir", "os.truncate"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def watch(folder, moment, log):
    seen, fsync, finished = collections.Counter(), os.fsync, 0

    def happened(event, path):
        nonlocal finished
        if not path.startswith(folder + "/"):
            return
        name = re.sub(r"\.part\d+", ".part", re.sub(r"-[0-9a-f]{32}", "-", path[len(folder) + 1:]))
        seen[event, name] += 1
        found = [event, name, seen[event, name], finished]
        log.append(found)
        if isinstance(moment, list) and moment[1:] == found:
            if moment[0] == "torn" and os.path.isfile(path):
                os.truncate(path, os.path.getsize(path) // 2)
            elif moment[0] == "torn":
                os.close(os.open(path, os.O_CREAT))
            os.kill(os.getpid(), signal.SIGKILL)
        if event == "os.rename" and re.fullmatch(r"[^/]+/\w+-[0-9a-f]{12}\.partial", name):
            finished += 1
            seen.clear()

    def audit(event, args):
        if event not in EVENTS or not isinstance(args[0], str | bytes | os.PathLike):
            return
        if event == "open" and not args[2] & WRITES:
            return
        happened(event, os.path.abspath(os.fsdecode(args[event == "os.link"])))

    def synced(handle):
        happened("fsync", os.readlink(f"/proc/self/fd/{handle if isinstance(handle, int) else handle.fileno()}"))
        fsync(handle)

    os.fsync = synced
    sys.addaudithook(audit)


def attempt(command, folder, moment, result):
    child = os.fork()
    if not child:
        log = []
        watch(folder, moment, log)
        start = time.monotonic()
        code = main([*command, f"output={folder}"])
        seconds = time.monotonic() - start
        if moment is None:
            with open(result, "w") as f:
                json.dump({"log": log, "seconds": seconds}, f)
        sys.stdout.flush()
        os._exit(code)
    if isinstance(moment, float):
        time.sleep(moment)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


command, workers, todo = json.load(sys.stdin)
for worker in range(workers):
    if not os.fork():
        for folder, moments, result in todo[worker::workers]:
            codes = [attempt(command, folder, moment, result) for moment in moments]
            os.write(1, (json.dumps([folder, codes]) + "\n").encode())  # in one piece, beside the other workers'
        os._exit(0)
for _ in range(workers):
    os.wait()
"""


def drill(command: list[str], todo: list[tuple[Path, list[Moment]]]) -> dict[Path, list[int]]:
    """Run a command in each folder once for each moment at which it is killed (None: it is not); gives exit codes.

    What an attempt that was not killed did is in `done(folder)` afterwards.
    """
    jobs = [(str(folder), moments, str(_result(folder))) for folder, moments in todo]
    said = json.dumps([command, min(2, os.cpu_count() or 1), jobs])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TARE_LOG": "quiet", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SERVER],
        input=said,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    codes = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert len(codes) == len(todo), done.stderr
    return {folder: codes[str(folder)] for folder, _ in todo}


def _result(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")


def done(folder: Path) -> tuple[list[list[Any]], float]:
    """File operations [operation, path, count, stages] of the last attempt that was not killed, and its seconds."""
    found = json.loads(_result(folder).read_text())
    return found["log"], found["seconds"]


def finished(log: list[list[Any]]) -> list[str]:
    """The folders of the stages that were made, in their order."""
    made = (path for event, path, *_ in log if event == "os.rename" and path.endswith(".partial"))
    return [path.rpartition("/")[2].removesuffix(".partial") for path in made]


def part_of(whole: Path, copy: Path, stages: Collection[str]) -> Path:
    """A copy of a finished output folder that holds these stages of its run, and what can only have come from them."""
    measured = {".measured"} if any(stage.startswith("gate-") for stage in stages) else set()

    def leave_out(folder: str, names: list[str]) -> set[str]:
        path = Path(folder)
        if path == whole:
            return {name for name in names if name.startswith(".")} - (measured | {".parents"} if stages else set())
        return set(names) - set(stages) if path.parent == whole and not path.name.startswith(".") else set()

    shutil.copytree(whole, copy, ignore=leave_out)
    return copy


def results(run: Path) -> dict[str, Any]:
    """All that a run made, by relative path: bytes; of files with times the content without these.

    Left out: the page and the pull-request table, which are made from verdict and summary.
    """
    found: dict[str, Any] = {}
    for path in sorted(p for p in run.rglob("*") if p.is_file()):
        name = path.relative_to(run).as_posix()
        if path.name in ("verdict.json", "summary.json", "measured.json") and "/release-" not in name:
            found[name] = without_times(json.loads(path.read_text()))
        elif path.name == "manifest.json":
            found[name] = {key: json.loads(path.read_text())[key] for key in ("stage", "key", "content", "versions")}
        elif path.name not in ("seconds.csv", ".lock", "report.html", "report.json", "summary.md"):
            found[name] = path.read_bytes()
    return found


def without_times(value: Any) -> Any:
    """JSON without what a clock, a memory or the number of attempts decides."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if "seconds" not in k and not k.startswith("peak_")}
        return {key: without_times(inner) for key, inner in kept.items() if key not in ("reused", "blocks_reused")}
    return [without_times(inner) for inner in value] if isinstance(value, list) else value


def leftovers(output: Path) -> list[str]:
    """Files of work that was stopped, which a finished run should not leave."""
    return sorted(str(path.relative_to(output)) for pattern in ("*.part*", "*.old") for path in output.rglob(pattern))
