"""summary.json of a run's folder, read again: what the run came to, and where its stages are. Loads no torch."""

from __future__ import annotations

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
