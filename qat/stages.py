"""A stage runs once per content: its folder is named by a key over everything that decides it.

    runs/<name>/<stage>-<key>.partial/   work in progress; handed again to the same stage after an interruption
    runs/<name>/<stage>-<key>/           finished: manifest.json was written last, then this one rename

key = sha256(stage, content, tare version, keys of the parents). Rank 0 decides and says so in a small file; other ranks
read it (no collective waits, so nothing times out during an hour of rounding).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from qat import __version__, manifest, report, summary, unjudged
from qat.peak import Peak
from qat.ranks import RankLog, RunError
from qat.recipe import Recipe

EXIT_CODES = {"released": 0, "ungated": 0, "failed": 1, "refused": 3, "anomalous": 3, "inconclusive": 4}
UNFINISHED = "the run has not finished: it is still going, or it was killed"
INTERRUPTED, STOPPED = 130, "stopped; the same command goes on where it was"  # of Ctrl-C: exit code, and what is said
ABANDONED_SECONDS = 86400.0
PARTIAL, OLD = ".partial", ".old"


@dataclass(frozen=True)
class Stage:
    """A finished stage. `digest` is over the bytes of its files."""

    name: str
    variant: str | None
    key: str
    path: Path
    reused: bool
    manifest: dict[str, Any]

    @property
    def digest(self) -> str:
        return manifest.digest(self.manifest["files"])

    @property
    def metrics(self) -> dict[str, Any]:
        return self.manifest["metrics"]


def stage_key(name: str, content: dict[str, Any], parent_keys: Sequence[str]) -> str:
    """The key of a stage. `content`: dumped sections, plugin versions, fingerprints; plain JSON."""
    return manifest.digest([name, content, __version__, list(parent_keys)])[:12]


def kind(name: str) -> str:
    """What the recipe calls a stage: `train` for train-1, train-2..."""
    return name.partition("-")[0]


class Run:
    """The folder runs/<name>, locked while the context is open. While it is, and when it ends with an error, its
    summary.json, summary.md and junit.xml say `failed`, and an earlier run's verdict and report are gone.

    rank, world_size: of this process, from RANK and WORLD_SIZE when not given. Raises RunError when another run has the
    folder, and on the other ranks when rank 0 failed.
    """

    def __init__(self, recipe: Recipe, rank: int | None = None, world_size: int | None = None) -> None:
        self.recipe, self.folder = recipe, recipe.folder
        self.rank = int(os.environ.get("RANK", 0)) if rank is None else rank
        self.world_size = int(os.environ.get("WORLD_SIZE", 1)) if world_size is None else world_size
        self.fingerprints = manifest.Fingerprints(Path(recipe.output) / ".fingerprints.json")
        self.stages: list[Stage] = []
        self.inputs: dict[str, Any] = {}  # fingerprints of weights and data, for the manifests; set by the pipeline
        self._finish: dict[str, Any] = {"status": "ungated"}
        self._log = RankLog(self.folder, self.rank, self.world_size)

    def __enter__(self) -> Run:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.rank == 0:
            self._log.start()
            try:
                self._lock = _lock(self.folder)
            except RunError as error:
                self._log.fail(str(error))
                raise
            self._sweep()
            # whatever ends this process without a word, an earlier run's verdict must not stand for this one
            unfinished = {**self.summary(), "status": "failed", "error": UNFINISHED}
            unjudged.forget(self.folder)
            manifest.write_json(self.folder / summary.FILE, unfinished)
            unjudged.write(self.folder, self.recipe.name, "failed", UNFINISHED)
        with suppress(ValueError):  # not the main thread: then somebody else minds the signals
            self._on_term = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with suppress(ValueError, AttributeError):
            signal.signal(signal.SIGTERM, self._on_term)
        if self.rank != 0:
            return
        if error is not None:
            interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
            text = "interrupted" if interrupted else manifest.told(error)
            if isinstance(error, SystemExit) and self.world_size > 1:  # the launcher ends all when one has failed
                text = "interrupted, or ended by the launcher because another process failed: see what it said"
            self._log.fail(text)
            self._finish = {**self._finish, "status": "failed", "error": text}
            unjudged.forget(self.folder)
        manifest.write_json(self.folder / summary.FILE, self.summary())
        if error is not None:
            unjudged.write(self.folder, self.recipe.name, "failed", text)
        elif self._finish["status"] == "ungated":
            unjudged.write(self.folder, self.recipe.name, "ungated", unjudged.NO_GATE)
        self._lock.close()

    def _sweep(self) -> None:
        """Remove torn files of killed runs; those in places that other runs share only when nobody can need them."""
        manifest.sweep(self.folder.glob("[!.]*.part[0-9]*"))
        shared = (
            f"{self.folder.name}/.launch*.part[0-9]*",
            ".fingerprints*.part[0-9]*",
            ".parents/*.part[0-9]*",
            ".measured/**/*.part[0-9]*",
        )
        for pattern in shared:
            manifest.sweep(self.folder.parent.glob(pattern), ABANDONED_SECONDS)

    def finish(self, status: str, **said: Any) -> int:
        """Say how the run ended; returns the exit code.

        said: exports, verdict, report, last_released as in summary.json, with Paths for paths.
        """
        self._finish = {"status": status, **said}
        return EXIT_CODES[status]

    def summary(self) -> dict[str, Any]:
        """summary.json: paths are relative to the folder of the run."""
        return summary.made(self.folder, self._finish, [self._line(stage) for stage in self.stages])

    def _line(self, stage: Stage) -> dict[str, Any]:
        kept = {name: stage.manifest[name] for name in ("seconds", "peak_rss_gb", "peak_gpu_gb", "metrics")}
        line = {"name": stage.name, "variant": stage.variant, "key": stage.key, "path": stage.path}
        return {**line, "reused": stage.reused, **kept}

    def stage(
        self,
        name: str,
        *,
        content: dict[str, Any],
        work: Callable[[Path], dict[str, Any]],
        parents: Sequence[Stage] = (),
        variant: str | None = None,
        everyone: bool = False,
    ) -> Stage:
        """The finished stage: reused, or made by `work(partial folder) -> metrics`.

        content: plain JSON, all that decides the result beside the parents; dumped from the recipe as a whole.
        everyone: `work` runs on all ranks (with one partial folder, into which rank 0 writes), else on rank 0 only.
        """
        key = stage_key(name, content, [parent.key for parent in parents])
        for done in self.stages:
            if (done.name, done.key) == (name, key):
                return done
        path = self.folder / f"{name}-{key}"
        if self.rank == 0:
            made = self._lead(name, variant, key, path, content, parents, work)
        else:
            made = self._follow(name, variant, key, path, work if everyone else None)
        self.stages.append(made)
        return made

    def _lead(
        self,
        name: str,
        variant: str | None,
        key: str,
        path: Path,
        content: dict[str, Any],
        parents: Sequence[Stage],
        work: Callable[[Path], dict[str, Any]],
    ) -> Stage:
        partial = path.with_name(path.name + PARTIAL)
        _recover(path)
        fresh = kind(name) in self.recipe.fresh
        what = f"{name}-{key}" + (f" ({variant})" if variant else "")
        if (found := manifest.read(path)) is not None and not fresh:
            why = manifest.damage(path, found) or _stale(found, parents)
            if why is None:
                shutil.rmtree(partial, ignore_errors=True)
                report.say(f"{what}: reused")
                self._log.add(key, "done", reused=True)
                return Stage(name, variant, key, path, True, found)
            report.say(f"{what}: made again, {why}")
        if fresh:
            shutil.rmtree(partial, ignore_errors=True)
        report.heading(what + (": resumed" if partial.exists() else ""))
        partial.mkdir(exist_ok=True)
        self._log.add(key, "working")
        with Peak() as peak:
            try:
                metrics = work(partial)
            except OSError as error:
                manifest.name_place(error, partial)
                raise
        for torn in partial.rglob("*.part*"):  # of a write that a kill stopped
            torn.unlink()
        assert not (partial / manifest.FILE).exists(), (
            f"{name} wrote {manifest.FILE}, which is the stage cache's own file"
        )
        recipe = self.recipe.model_dump()
        made = {
            "stage": name,
            "variant": variant,
            "key": key,
            "versions": manifest.versions(),
            "content": content,
            "parents": [{"name": p.name, "key": p.key, "digest": p.digest} for p in parents],
            "inputs": self.inputs,
            "seeds": manifest.seeds(recipe),
            "recipe": recipe,
            "files": manifest.list_files(partial),
            "seconds": round(peak.seconds, 3),
            "peak_rss_gb": round(peak.rss_gb, 3),
            "peak_rss_by": peak.by,
            "peak_gpu_gb": None if peak.gpu_gb is None else round(peak.gpu_gb, 3),
            "metrics": metrics,
        }
        manifest.sync(partial)
        manifest.write_json(partial / manifest.FILE, made)
        _put(partial, path)
        self._log.add(key, "done", reused=False)
        return Stage(name, variant, key, path, False, made)

    def _follow(
        self, name: str, variant: str | None, key: str, path: Path, work: Callable[[Path], dict[str, Any]] | None
    ) -> Stage:
        # what rank 0 makes alone may depend on its machine (gate.latency), and so does the key
        expected = key if work else None
        entry = self._log.wait(len(self.stages), expected)
        if entry["state"] == "working" and work:
            work(path.with_name(path.name + PARTIAL))
        entry = self._log.wait(len(self.stages), expected, "done")
        key, path = entry["key"], self.folder / f"{name}-{entry['key']}"
        found = manifest.read(path)
        if found is None:
            raise RunError(f"rank 0 finished {path}, but rank {self.rank} does not see it: output needs a shared disk")
        return Stage(name, variant, key, path, entry["reused"], found)


def _lock(folder: Path) -> Any:
    """Hold the folder until the file returned is closed, or this process ends in whatever way."""
    file = (folder / ".lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip()
        file.close()
        raise RunError(
            f"{folder} is in use by process {holder or 'unknown'}; wait for it, or give this run a folder of its own: "
            "name=..."
        ) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def _stale(found: dict[str, Any], parents: Sequence[Stage]) -> str | None:
    """Why a finished stage does not follow from its parents as they are now, or None."""
    for was, parent in zip(found["parents"], parents, strict=True):
        if was["digest"] != parent.digest:
            return f"{parent.name}-{parent.key} now has other bytes"
    return None


def _put(partial: Path, path: Path) -> None:
    """Make a complete partial folder the finished one. An older one goes only after the new one stands."""
    old = path.with_name(path.name + OLD)
    if path.exists():
        os.rename(path, old)
    os.rename(partial, path)
    manifest.fsync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _recover(path: Path) -> None:
    """Finish or undo a `_put` that was interrupted, so that either the old or the new stage stands."""
    partial, old = path.with_name(path.name + PARTIAL), path.with_name(path.name + OLD)
    if old.exists() and path.exists():
        shutil.rmtree(old)
    if manifest.read(partial) is not None:
        _put(partial, path)
    elif old.exists():
        os.rename(old, path)
