"""`tare verify`: is every file of a release, a stage or a run what its manifest says? Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from pydantic import BaseModel

from qat import manifest, report, summary

RELEASE = "tare.json"


class File(BaseModel):
    """What a manifest says of one file."""

    size: int
    sha256: str


class Listed(BaseModel):
    """The part of a manifest that is checked."""

    files: dict[str, File]


def main(folders: list[Path]) -> int:
    """Check every folder and say what differs; 0 when nothing does, else 1."""
    wrong = 0
    for folder in folders:
        try:
            files = list(manifests(folder))
        except ValueError as error:
            report.complain(str(error))
            wrong += 1
            continue
        for file in files:
            found = list(differences(file))
            wrong += len(found)
            for problem in found:
                report.complain(f"{file.parent}: {problem}")
            if not found:
                count = report.plural(len(listed(file)), "file")
                report.say(f"{file.parent}: {count} as {file.name} says (sha256 {manifest.hash_file(file)})")
    return 1 if wrong else 0


def manifests(folder: Path) -> Iterator[Path]:
    """The manifest of a release or stage, or those of all stages of a run. Raises ValueError where there is none."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give that of a release, a stage or a run")
    if (folder / summary.FILE).is_file():
        for stage in summary.read(folder)["stages"]:
            yield folder / stage["path"] / manifest.FILE
        return
    found = next((folder / name for name in (RELEASE, manifest.FILE) if (folder / name).is_file()), None)
    if found is None:
        raise ValueError(
            f"{folder} has no {RELEASE} (a release), {manifest.FILE} (a stage) or {summary.FILE} (a run); nothing says "
            "what its files should be"
        )
    yield found


def differences(file: Path) -> Iterator[str]:
    """What is missing, altered or not listed, in sentences. Names that start with a dot are not looked at."""
    if not file.is_file():
        yield f"{file.name} is missing"
        return
    try:
        known = listed(file)
    except ValueError as error:
        yield str(error)
        return
    for name, said in known.items():
        path = file.parent / name
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            yield f"{name} leads out of the folder"
        elif not path.is_file():
            yield f"{name} is missing"
        elif path.stat().st_size != said.size:
            yield f"{name} has {path.stat().st_size} bytes, not {said.size}"
        elif (found := manifest.hash_file(path)) != said.sha256:
            yield f"{name} has sha256 {found}, not {said.sha256}"
    for path in sorted(p for p in file.parent.rglob("*") if p.is_file() and p != file):
        parts = path.relative_to(file.parent).parts
        if "/".join(parts) not in known and not any(part.startswith(".") for part in parts):
            yield f"{'/'.join(parts)} is not in {file.name}"


def listed(file: Path) -> dict[str, File]:
    """The files that a manifest lists. Raises ValueError when it is none."""
    return manifest.shaped(Listed, manifest.read_json(file), file).files
