"""How large a model is, from its config and the headers of its weight files: no tensor is read, torch not imported."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from qat.index import model_files
from qat.manifest import read_json

# bytes of GGUF's fixed-size metadata types by their number; 8 is a string, 9 an array (GGUF specification, version 3)
GGUF_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


@dataclass(frozen=True)
class Sizes:
    """Parameter counts of a model.

    linear: weights of the linears in the blocks, which are what is quantized. largest_block: all of one block. rest:
    all other parameters, embedding and head among them. hidden: width of the residual stream; 0 when unknown.
    """

    linear: int
    largest_block: int
    rest: int
    num_blocks: int
    vocabulary: int
    hidden: int
    file_bytes: int

    @property
    def total(self) -> int:
        return self.linear + self.rest

    @property
    def matmul(self) -> int:
        """Weights that each token is multiplied with: the blocks' linears and the head."""
        return self.linear + self.vocabulary * self.hidden


def of_folder(folder: Path) -> Sizes:
    """The sizes of a Hugging Face folder. Raises ValueError for a broken safetensors header."""
    config = read_json(folder / "config.json")
    shapes = folder_shapes(folder)
    for key in ("vocab_size", "hidden_size"):
        if not isinstance(config.setdefault(key, 0), int):
            raise ValueError(f"{folder / 'config.json'}: {key} is {config[key]!r}, where a whole number is expected")
    file_bytes = sum(path.stat().st_size for path in _weight_files(folder))
    return _count(shapes, config["vocab_size"], config["hidden_size"], file_bytes)


def folder_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a Hugging Face folder. Raises ValueError for a broken safetensors header."""
    return {name: shape for file in _weight_files(folder) for name, shape in safetensors_shapes(file)}


def _weight_files(folder: Path) -> list[Path]:
    return [path for path in model_files(folder) if path.suffix == ".safetensors"]


def of_gguf(path: Path) -> Sizes:
    """The sizes of a GGUF file. Raises ValueError when it is none."""
    shapes = dict(gguf_shapes(path))
    embedding = shapes.get("token_embd.weight", (0, 0))
    return _count(shapes, embedding[0], embedding[1], path.stat().st_size)


def _count(shapes: dict[str, tuple[int, ...]], vocabulary: int, hidden: int, file_bytes: int) -> Sizes:
    blocks: dict[int, int] = {}
    linear = total = 0
    for name, shape in shapes.items():
        count = math.prod(shape)
        total += count
        index = next((int(part) for part in name.split(".") if part.isdigit()), None)
        if index is not None:
            blocks[index] = blocks.get(index, 0) + count
            linear += count if len(shape) == 2 else 0
    return Sizes(linear, max(blocks.values(), default=0), total - linear, len(blocks), vocabulary, hidden, file_bytes)


def safetensors_shapes(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of each tensor: the header is 8 bytes with its length, then JSON."""
    with path.open("rb") as f:
        start = f.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= path.stat().st_size - 8:
            raise ValueError(f"{path} has no safetensors header; is it whole (a Git-LFS pointer is not)?")
        header: dict[str, Any] = json.loads(f.read(length))
    for name, entry in header.items():
        if name != "__metadata__":
            yield name, tuple(entry["shape"])


def gguf_shapes(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of each tensor, slowest dimension first, from the header after all metadata is stepped over."""
    with path.open("rb") as f:
        if f.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file")
        _, num_tensors, num_metadata = struct.unpack("<IQQ", f.read(20))
        for _ in range(num_metadata):
            _string(f)
            _skip(f, _number(f, "I"))
        for _ in range(num_tensors):
            name = _string(f)
            shape = struct.unpack(f"<{(rank := _number(f, 'I'))}Q", f.read(8 * rank))
            f.seek(12, 1)  # type and offset
            yield name, shape[::-1]


def _number(f: BinaryIO, code: str) -> int:
    return struct.unpack(f"<{code}", f.read(struct.calcsize(f"<{code}")))[0]


def _string(f: BinaryIO) -> str:
    return f.read(_number(f, "Q")).decode("utf-8", "replace")


def _skip(f: BinaryIO, kind: int) -> None:
    if kind == 8:
        f.seek(_number(f, "Q"), 1)
    elif kind == 9:
        inner, count = _number(f, "I"), _number(f, "Q")
        if inner in GGUF_BYTES:
            f.seek(GGUF_BYTES[inner] * count, 1)
        else:
            for _ in range(count):
                _skip(f, inner)
    else:
        f.seek(GGUF_BYTES[kind], 1)
