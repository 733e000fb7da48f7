"""How the ranks of one launch agree: rank 0 writes what it decides to a small file, the others poll it.

No collective is involved, so nothing times out while rank 0 works for an hour, and a rank 0 that fails or is killed is
noticed within a second.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from qat import manifest

TICK = 0.01  # seconds: the grain of process start times


def leave() -> None:
    """Close the process group that stages opened, if any, when all ranks have come to the end of a run.

    A process that just ends can take gloo's threads down in mid-air, and its exit code with them.
    """
    import torch  # not above: `tare plan` does without

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


class RunError(RuntimeError):
    """A run that cannot go on, for a reason outside the stage's own work."""


class RankLog:
    """What rank 0 tells the other ranks of this launch, in one small file that it rewrites: one entry per stage."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
        launch = ":".join(os.environ.get(name, "") for name in names)
        self.path = folder / f".launch-{hashlib.sha256(launch.encode()).hexdigest()[:8]}.json"
        self.rank, self.alone = rank, world_size == 1
        self.parent, self.born = os.getppid(), _born()
        self.entries: list[dict[str, Any]] = []

    def start(self) -> None:
        """Rank 0 is there."""
        self._write(None)

    def add(self, key: str, state: str, reused: bool = False) -> None:
        """Rank 0 works on a stage (state `working`), or has it (`done`)."""
        if self.entries and self.entries[-1]["key"] == key:
            self.entries.pop()
        self.entries.append({"key": key, "state": state, "reused": reused})
        self._write(None)

    def fail(self, error: str) -> None:
        """Rank 0 gives up."""
        self._write(error)

    def _write(self, error: str | None) -> None:
        if not self.alone:
            said = {"pid": os.getpid(), "host": socket.gethostname(), "entries": self.entries, "error": error}
            manifest.write_json(self.path, said)

    def wait(self, index: int, key: str | None, state: str | None = None) -> dict[str, Any]:
        """Entry `index` once rank 0 has written it, in `state` if given.

        RunError when it has another key (None takes any), and when rank 0 failed or is gone.
        """
        pause = 0.02
        while True:
            said = self._read()
            entries = said["entries"] if said else []
            if index < len(entries):
                if key not in (None, entries[index]["key"]):
                    raise RunError(
                        f"rank {self.rank} is at stage {key}, rank 0 at {entries[index]['key']}: the ranks read "
                        "different recipes or files; start all of them with the same command on a shared disk"
                    )
                if state in (None, entries[index]["state"]):
                    return entries[index]
            if said and said["error"]:
                raise RunError(f"rank 0 failed: {said['error']}")
            # read twice: its last words may have come in between
            if said and said["host"] == socket.gethostname() and not _alive(said["pid"]) and self._read() == said:
                raise RunError(f"rank 0 (process {said['pid']}) is gone without a word")
            if os.getppid() != self.parent:
                raise RunError("the launcher of this process is gone")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.5)

    def _read(self) -> dict[str, Any] | None:
        """What rank 0 of this launch wrote; None before that.

        A file last written before this process began is an earlier launch's, unless its writer still runs: then this
        rank only started late. Clocks of other hosts may differ.
        """
        with suppress(FileNotFoundError), self.path.open(encoding="utf-8") as f:
            said = json.load(f)
            here = said["host"] == socket.gethostname()
            if os.fstat(f.fileno()).st_mtime >= self.born - (TICK if here else 60) or (here and _alive(said["pid"])):
                return said
        return None


def _born() -> float:
    """When this process began, in seconds of the wall clock."""
    try:  # psutil's create_time is off by up to a second on Linux, where the boot time is known in whole seconds
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except FileNotFoundError:
        return psutil.Process().create_time()
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
