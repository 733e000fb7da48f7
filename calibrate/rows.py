"""Weights are worked on a few rows at a time: within the cache of a core, or a share of a GPU's memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import overload

from torch import Tensor

CHUNK = {"cpu": 2**18, "cuda": 2**26}  # weights at once, by device


def chunks(weight: Tensor, rows: int | None = None) -> Iterator[slice]:
    """Slices that cover the rows of a weight (N, K), `rows` at a time (None: as many as are fast)."""
    step = rows or max(1, CHUNK.get(weight.device.type, CHUNK["cpu"]) // weight.shape[1])
    for start in range(0, len(weight), step):
        yield slice(start, start + step)


@overload
def at(x: Tensor, rows: slice) -> Tensor: ...


@overload
def at(x: None, rows: slice) -> None: ...


@overload
def at(x: Tensor | None, rows: slice) -> Tensor | None: ...


def at(x: Tensor | None, rows: slice) -> Tensor | None:
    """The rows of a scale or zero point; all of one that every row shares (1, 1)."""
    return x if x is None or len(x) == 1 else x[rows]
