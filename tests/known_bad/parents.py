"""How the files of a parent are spoiled, for test_load.py."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file

from tests.known_bad.case import (
    UP,
    WEIGHTS,
    Place,
    Spoil,
    tensors,
)

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 123\n"


def header(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    """Rewrite the header of the weight file; the data stay."""

    def spoil(place: Place) -> None:
        content = (place.model / WEIGHTS).read_bytes()
        length = struct.unpack("<Q", content[:8])[0]
        said = json.loads(content[8 : 8 + length])
        text = change(said) or json.dumps(said)
        (place.model / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text.encode() + content[8 + length :])

    return spoil


def twice(said: dict[str, Any]) -> str:
    """The same name for two tensors."""
    return json.dumps(said).replace(f'"{UP}"', f'"{UP.replace("up", "gate")}"')


def cut(bytes_left: int) -> Spoil:
    def spoil(place: Place) -> None:
        (place.model / WEIGHTS).write_bytes((place.model / WEIGHTS).read_bytes()[:bytes_left])

    return spoil


def keep_only(*names: str) -> Spoil:
    def spoil(place: Place) -> None:
        path = place.model / "config.json"
        path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k not in names}))

    return spoil


def pickled(place: Place) -> None:
    torch.save(load_file(place.model / WEIGHTS), place.model / "pytorch_model.bin")
    (place.model / WEIGHTS).unlink()


def symlink(target: str) -> Spoil:
    def spoil(place: Place) -> None:
        (place.model / WEIGHTS).unlink()
        os.symlink(place.root / target, place.model / WEIGHTS)

    return spoil


def as_in_the_hub_cache(place: Place) -> None:
    """Every file a link to a blob, and the folder itself another name for it."""
    folder, blobs = place.root / "snapshots/model", place.root / "blobs"
    folder.parent.mkdir()
    blobs.mkdir()
    shutil.move(place.model, folder)
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.move(path, blobs / str(number))
        os.symlink(blobs / str(number), path)
    os.symlink(folder, place.model)


def vocabulary(**ids: int) -> Spoil:
    """Give letters of the tokenizer other ids."""

    def spoil(place: Place) -> None:
        path = place.model / "tokenizer.json"
        said = json.loads(path.read_text())
        said["model"]["vocab"] |= ids
        path.write_text(json.dumps(said))

    return spoil


def added_token(place: Place) -> list[str]:
    """As in Gemma 3's text models, whose tokenizer has a token for images."""
    path = place.model / "tokenizer.json"
    said = json.loads(path.read_text())
    said["added_tokens"].append({**said["added_tokens"][0], "id": 257, "content": "<image>"})
    path.write_text(json.dumps(said))
    return ["until=calibrate"]


def forget(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda found: found.pop(name)


def to(dtype: torch.dtype, name: str = UP) -> Spoil:
    return tensors(lambda found: found.update({name: found[name].to(dtype)}))


def more_block(found: dict[str, torch.Tensor]) -> None:
    found["model.layers.2.mlp.up_proj.weight"] = found[UP].clone()
