"""Names, dtypes, shapes and places of the tensors of a folder, from the safetensors headers alone: no weight is read.

A file is 8 bytes with the header's length (little endian), the header (JSON: name -> dtype, shape, data_offsets), then
the data, without gaps.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, TypeAdapter

from qat.manifest import json_object

WIDTH = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1}  # bytes
LONGEST = 100 * 2**20  # bytes of header that the format allows


class _Meta(BaseModel):
    """What a header says of one tensor."""

    model_config = ConfigDict(strict=True)
    dtype: str
    shape: list[NonNegativeInt]
    data_offsets: Annotated[list[NonNegativeInt], Field(min_length=2, max_length=2)]


TENSORS = TypeAdapter(dict[str, _Meta])


class Entry(NamedTuple):
    """One stored tensor. dtype: as the header spells it (`F16`, `I32`, `F8_E4M3`...)."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of one file. Raises ValueError when it is not whole or its header contradicts itself.

    A header is read once while nobody touches its file.
    """
    status = path.stat()
    return dict(_read(path, status.st_size, status.st_mtime_ns))


@lru_cache(maxsize=1024)
def _read(path: Path, size: int, mtime_ns: int) -> dict[str, Entry]:
    with path.open("rb") as f:
        first = f.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else LONGEST + 1
        if length > min(LONGEST, size - 8):
            raise ValueError(f"{path} is not a safetensors file, or only its beginning ({size} bytes); copy it again")
        try:
            header = json_object(f.read(length), path)
            header.pop("__metadata__", None)
            tensors = TENSORS.validate_python(header)
        except ValueError as error:
            raise ValueError(f"{path} has an unreadable header ({error}); copy it again") from error
    found, expected_start = {}, 0
    for name, meta in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        start, end = meta.data_offsets
        width = WIDTH.get(meta.dtype)
        wrong = start != expected_start or end < start
        if wrong or (width is not None and end - start != width * math.prod(meta.shape)):
            raise ValueError(f"{path}: {name} claims bytes {start}..{end}, which fit neither its shape nor the rest")
        found[name] = Entry(path.name, meta.dtype, tuple(meta.shape), end - start)
        expected_start = end
    if 8 + length + expected_start != size:
        raise ValueError(f"{path} has {size} bytes, its header promises {8 + length + expected_start}; copy it again")
    return found


def weight_files(folder: Path) -> list[str]:
    """Names of the safetensors files of a folder, sorted."""
    return sorted(p.name for p in folder.glob("*.safetensors"))
