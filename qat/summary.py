"""summary.json of a run's folder: what the run came to, and where its stages are. Loads no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from qat import manifest

FILE = "summary.json"


class Stage(BaseModel):
    name: str
    variant: str | None
    key: str
    path: str
    metrics: dict[str, Any]


class Export(BaseModel):
    path: str


class Summary(BaseModel):
    status: str
    exports: dict[str, Export]
    verdict: str | None
    stages: list[Stage]


def read(folder: Path) -> dict[str, Any]:
    """What the run in `folder` said. Raises ValueError when that is no summary, or one of a run without a stage."""
    found = manifest.read_json(folder / FILE)
    manifest.shaped(Summary, found, folder / FILE)
    if not found["stages"]:
        before = found.get("last_released")
        way = f"finish that run first, or give the release of the run before it, {folder / before}" if before else ""
        raise ValueError(f"{folder} has no finished stage (status {found['status']}); {way or 'finish that run first'}")
    return found


def made(folder: Path, said: Mapping[str, Any], stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The summary of the run in `folder`, with paths relative to it.

    said: status, exports, verdict, report, last_released, error, with Paths for paths. stages: one line for each.
    """
    released = said.get("last_released")
    if released is None:  # an earlier run's release still stands
        before = last(folder).get("last_released")
        released = before if isinstance(before, str) and (folder / before).exists() else None
    out = {
        "status": said["status"],
        "exports": said.get("exports", {}),
        "verdict": said.get("verdict"),
        "report": said.get("report"),
        "last_released": released,
        "stages": list(stages),
    }
    if "error" in said:
        out["error"] = said["error"]
    return _relative(out, folder)


def last(folder: Path) -> dict[str, Any]:
    """What the last run said; nothing when it said nothing, or half of it."""
    try:
        return manifest.read_json(folder / FILE)
    except ValueError:
        return {}


def _relative(value: Any, folder: Path) -> Any:
    """`value` with each Path as text relative to `folder`."""
    if isinstance(value, Path):
        return os.path.relpath(value, folder)
    if isinstance(value, dict):
        return {key: _relative(inner, folder) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_relative(inner, folder) for inner in value]
    return value
