"""Tensors by name, from a Hugging Face folder of safetensors files. The one place that opens weight files.

Everything that reads weights (a parent, an artifact, an exported directory) offers `names()` and `get(name)`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from qat.index import INDEX, weight_map

__all__ = ["IGNORED", "INDEX", "Entry", "SafetensorsFolder", "Tensors"]

IGNORED = ".rotary_emb.inv_freq"  # a buffer that old Llama checkpoints store and transformers computes


class Tensors(Protocol):
    """A source of named tensors."""

    def names(self) -> list[str]: ...

    def get(self, name: str) -> Tensor: ...


class Entry(NamedTuple):
    """What a header says of a tensor. dtype: as it spells it (`BF16`, `F32`, `I64`...)."""

    dtype: str
    shape: tuple[int, ...]


class SafetensorsFolder:
    """Tensors of one or more `*.safetensors` files of a folder, found through the index or, without one, all files.

    Raises ValueError for a file that is missing, truncated, not safetensors (a Git-LFS pointer, a pickle), named twice
    or outside the folder. Each `get` copies the tensor and closes the file, so no mapped pages stay in memory.
    """

    def __init__(self, folder: Path, files: list[str] | None = None) -> None:
        self.folder = folder
        self._file_of: dict[str, str] = {}
        index = folder / INDEX
        if files is None and index.is_file():
            self._read_index(index)
            return
        for file in files if files is not None else self._weight_files():
            for name in self._keys(file):
                if name in self._file_of:
                    raise ValueError(f"{folder}: tensor {name} is in both {self._file_of[name]} and {file}; keep one")
                self._file_of[name] = file

    def _weight_files(self) -> list[str]:
        files = sorted(p.name for p in self.folder.glob("*.safetensors"))
        if not files:
            other = sorted(p.name for p in self.folder.glob("*.bin")) + sorted(p.name for p in self.folder.glob("*.pt"))
            hint = f" ({other[0]} is a pickle, which is never loaded: convert it to safetensors)" if other else ""
            raise ValueError(f"{self.folder} holds no *.safetensors file{hint or '; give the folder of a whole model'}")
        return files

    def _read_index(self, index: Path) -> None:
        self._file_of = weight_map(index)
        for file in self.files():
            missing = {n for n, f in self._file_of.items() if f == file} - set(self._keys(file))
            if missing:
                raise ValueError(
                    f"{index} says that {file} holds {min(missing)}, but it does not; one of them is of another "
                    "model, or not whole: fetch both again"
                )

    def _keys(self, file: str) -> list[str]:
        with self._open(file) as f:
            return list(f.keys())

    def _open(self, file: str) -> Any:
        path = self.folder / file
        if not path.is_file():
            why = "the index names it" if (self.folder / INDEX).is_file() else "its folder lists it, or did"
            raise ValueError(f"{path} is missing; {why}: fetch it again")
        try:
            return safe_open(path, framework="pt")
        except SafetensorError as error:
            with path.open("rb") as f:
                is_pointer = f.read(20).startswith(b"version https://git")
            why = (
                "a Git-LFS pointer: fetch the real file (git lfs pull)"
                if is_pointer
                else f"not valid: {error}; fetch it again"
            )
            raise ValueError(f"{path} is {why}") from error

    def names(self) -> list[str]:
        return [name for name in self._file_of if not name.endswith(IGNORED)]

    def entries(self) -> dict[str, Entry]:
        """Dtype and shape of every tensor of `names()`; reads headers only."""
        found = {}
        for file in self.files():
            with self._open(file) as f:
                for name in f.keys():  # noqa: SIM118 - not a dict
                    part = f.get_slice(name)
                    found[name] = Entry(part.get_dtype(), tuple(part.get_shape()))
        return {name: found[name] for name in self.names()}

    def files(self) -> list[str]:
        return sorted(set(self._file_of.values()))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor, from its file's header."""
        with self._open(self._file_of[name]) as f:
            return tuple(f.get_slice(name).get_shape())

    def get(self, name: str) -> Tensor:
        """A copy of one tensor. Raises KeyError when there is none of that name."""
        with self._open(self._file_of[name]) as f:
            return f.get_tensor(name).clone()
