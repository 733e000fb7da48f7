"""The index of a sharded checkpoint: which file holds which tensor. Loads no torch."""

from __future__ import annotations

from pathlib import Path

from qat.manifest import read_json

INDEX = "model.safetensors.index.json"


def weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name. Raises ValueError for an index that is no such map or points outside its folder."""
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise ValueError(f"{index} has no weight_map from tensors to files; fetch the index again")
    for file in sorted(set(found.values())):
        if Path(file).name != file:
            raise ValueError(f"{index} points to {file!r}, outside its folder; shards must lie beside the index")
    return found
