"""Files and index of an exported directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gate._check import Fault
from gate.readers._headers import read_header, weight_files
from qat.index import ARTIFACT, INDEX, checkpoints_below, weight_map


def check(folder: Path) -> Iterator[Fault]:
    """Faults of config.json, the shards and their index; reads headers only."""
    if not (folder / "config.json").is_file():
        below = ", ".join(map(str, checkpoints_below(folder)))
        fix = f"checkpoints lie below: give one of {below}" if below else "export again"
        yield Fault("config", str(folder / "config.json"), "missing", "engines start from it", fix)
        return
    if (folder / ARTIFACT).is_file():
        rule = "engines load what was exported from it"
        yield Fault("config", str(folder), "a stage before export, in Tare's own layout", rule, "give that folder")
        return
    files = weight_files(folder)
    if not files:
        yield Fault("shard", str(folder), "no *.safetensors file", "weights are safetensors", "export again")
        return
    place: dict[str, str] = {}
    is_whole = True
    for file in files:
        try:
            names = list(read_header(folder / file))
        except ValueError as error:
            yield Fault("shard", str(folder / file), str(error), "a shard must be whole", "export or copy it again")
            is_whole = False
            continue
        for name in names:
            if name in place:
                what = f"also in {place[name]}"
                yield Fault("shard", f"{file}: {name}", what, "a tensor is stored once", "remove the stale shard")
                is_whole = False
            place[name] = file
    if is_whole:
        yield from _index(folder, files, place)


def _index(folder: Path, files: list[str], place: dict[str, str]) -> Iterator[Fault]:
    path = folder / INDEX
    fix = "write the index again from the shards"
    if not path.is_file():
        if len(files) > 1:
            yield Fault("index", INDEX, f"missing beside {len(files)} shards", "several shards need an index", fix)
        return
    try:
        listed = weight_map(path)
    except ValueError as error:
        yield Fault("index", INDEX, f"unreadable ({error})", "the index is JSON with a weight_map", fix)
        return
    pairs = set(listed.items())
    stored = set(place.items())
    for name, file in sorted(pairs - stored):
        what = f"listed in {file}, but is in {place.get(name, 'no shard')}"
        yield Fault("index", name, what, "index and shards hold the same tensors", fix)
    for name, file in sorted(stored - pairs):
        if name not in listed:
            yield Fault("index", name, f"in {file}, but not listed", "index and shards hold the same tensors", fix)
