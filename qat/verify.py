"""`tare verify`: is every file of a release, a stage or a run what its manifest says? Loads no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from qat import manifest, report

RELEASE, RUN = "tare.json", "summary.json"


def main(folders: list[Path]) -> int:
    """Check every folder and say what differs; 0 when nothing does, else 1."""
    wrong = 0
    for folder in folders:
        try:
            listed = list(manifests(folder))
        except ValueError as error:
            report.complain(str(error))
            wrong += 1
            continue
        for file in listed:
            found = list(differences(file))
            wrong += len(found)
            for problem in found:
                report.complain(f"{file.parent}: {problem}")
            if not found:
                count = len(_read(file)["files"])
                report.say(f"{file.parent}: {count} files are as in {file.name} (sha256 {manifest.hash_file(file)})")
    return 1 if wrong else 0


def manifests(folder: Path) -> Iterator[Path]:
    """The manifest of a release or stage, or those of all stages of a run. Raises ValueError where there is none."""
    if (folder / RUN).is_file():
        summary = json.loads((folder / RUN).read_text(encoding="utf-8"))
        for stage in summary["stages"]:
            yield folder / stage["path"] / manifest.FILE
        return
    found = next((folder / name for name in (RELEASE, manifest.FILE) if (folder / name).is_file()), None)
    if found is None:
        raise ValueError(
            f"{folder} has no {RELEASE} (a release), {manifest.FILE} (a stage) or {RUN} (a run); nothing says what its "
            "files should be"
        )
    yield found


def differences(file: Path) -> Iterator[str]:
    """What is missing, altered or not listed, in sentences. Names that start with a dot are not looked at."""
    if not file.is_file():
        yield f"{file.name} is missing"
        return
    try:
        listed: dict[str, dict[str, Any]] = _read(file)["files"]
    except (ValueError, KeyError, TypeError) as error:
        yield f"{file.name} is not a manifest: {type(error).__name__} {error}"
        return
    for name, said in listed.items():
        path = file.parent / name
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            yield f"{name} leads out of the folder"
        elif not path.is_file():
            yield f"{name} is missing"
        elif path.stat().st_size != said["size"]:
            yield f"{name} has {path.stat().st_size} bytes, not {said['size']}"
        elif (found := manifest.hash_file(path)) != said["sha256"]:
            yield f"{name} has sha256 {found}, not {said['sha256']}"
    for path in sorted(p for p in file.parent.rglob("*") if p.is_file() and p != file):
        parts = path.relative_to(file.parent).parts
        if "/".join(parts) not in listed and not any(part.startswith(".") for part in parts):
            yield f"{'/'.join(parts)} is not in {file.name}"


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found
