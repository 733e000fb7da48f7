"""The hidden states between two blocks: on the device, then in host memory, then on disk, within stated budgets."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

DEVICE_BYTES = 2 * 2**30  # of an accelerator's memory


class Activations:
    """A list of tensors (batch, length, hidden), one a batch, whose values do not depend on where they lie.

    batches: windows in each. length, hidden, dtype: of every tensor. host_bytes: what may lie in host memory, which
    is all but disk on a CPU. folder: where the rest goes, in files that `close` removes.
    """

    def __init__(
        self,
        batches: Sequence[int],
        length: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        host_bytes: int,
        folder: Path,
        name: str = "activations",
    ) -> None:
        self.shapes, self.dtype = [(batch, length, hidden) for batch in batches], dtype
        self._device = device
        self._tensors: list[Tensor | None] = [None] * len(batches)
        self._where: list[str] = []
        room = {"device": 0 if device.type == "cpu" else DEVICE_BYTES, "host": host_bytes}
        for shape in self.shapes:
            size = shape[0] * shape[1] * shape[2] * dtype.itemsize
            place = next((place for place, left in room.items() if left >= size), "disk")
            self._where.append(place)
            if place != "disk":
                room[place] -= size
        self._files = [folder / f".{name}-{i:05d}" if place == "disk" else None for i, place in enumerate(self._where)]

    @property
    def disk_bytes(self) -> int:
        """What lies on disk once every batch is set."""
        on_disk = [shape for shape, place in zip(self.shapes, self._where, strict=True) if place == "disk"]
        return sum(a * b * c for a, b, c in on_disk) * self.dtype.itemsize

    def __len__(self) -> int:
        return len(self.shapes)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Tensor:
        """The tensor of a batch, on the device of the computation."""
        tensor = self._tensors[index]
        if tensor is None:
            raise IndexError(f"batch {index} of {len(self)} was not set")
        return tensor.to(self._device)

    def __setitem__(self, index: int, value: Tensor) -> None:
        assert value.shape == self.shapes[index], (value.shape, self.shapes[index])
        place, file = self._where[index], self._files[index]
        if file is None:
            self._tensors[index] = value.to(self._device if place == "device" else "cpu", self.dtype)
            return
        tensor = self._tensors[index]
        if tensor is None:
            with file.open("wb") as f:  # the space is taken now: a full disk is an error here, not a crash later
                os.posix_fallocate(f.fileno(), 0, value.numel() * self.dtype.itemsize)
            tensor = torch.from_file(str(file), shared=True, size=value.numel(), dtype=self.dtype).view(value.shape)
            self._tensors[index] = tensor
        tensor.copy_(value)

    def close(self) -> None:
        """Drop everything, files included."""
        self._tensors = [None] * len(self)
        for file in self._files:
            if file is not None:
                file.unlink(missing_ok=True)
