"""Weights are worked on a few rows at a time: within the cache of a core, or a share of a GPU's memory.

On a CPU the parts go to threads that each keep to one core. Splitting every one of thousands of small operations over
the cores instead makes them wait for each other: 50 times slower was measured on a machine with other work to do.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, overload

import torch
from torch import Tensor

CHUNK = {"cpu": 2**18, "cuda": 2**26}  # weights at once, by device
PARTS = 8  # at least, on a CPU: not the number of cores, on which the last bits of a result must not depend
T = TypeVar("T")


def each(weight: Tensor, work: Callable[[slice], T], copies: int = 1, unit: int = 1) -> list[T]:
    """`work(rows)` for slices that cover the rows of a weight (N, K), in order. copies: of them that `work` holds.

    unit: slices start at its multiples; rows that share one scale.
    """
    device = weight.device.type
    step = max(1, CHUNK.get(device, CHUNK["cpu"]) // (weight.shape[1] * copies))
    if device == "cpu":
        step = min(step, -(-len(weight) // PARTS))
    step = -(-step // unit) * unit
    parts = [slice(start, start + step) for start in range(0, len(weight), step)]
    if device != "cpu":
        return [work(part) for part in parts]
    with ThreadPoolExecutor(torch.get_num_threads(), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return list(pool.map(work, parts))


@overload
def at(x: Tensor, rows: slice, unit: int = 1) -> Tensor: ...


@overload
def at(x: None, rows: slice, unit: int = 1) -> None: ...


@overload
def at(x: Tensor | None, rows: slice, unit: int = 1) -> Tensor | None: ...


def at(x: Tensor | None, rows: slice, unit: int = 1) -> Tensor | None:
    """The rows of a scale or zero point, each for `unit` rows of the weight; all of one that every row shares (1, 1).

    rows: starts at a multiple of `unit`.
    """
    return x if x is None or len(x) == 1 else x[rows.start // unit : -(-rows.stop // unit)]
