"""What a rounding that works on a whole block at once (`calibrate/round/learned.py`) is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from calibrate.inputs import InputStats
from qat.scheme import TensorFormat


class Batches(Protocol):
    """A tensor per batch; `calibrate.activations.Activations` and a list are some."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Tensor: ...


@dataclass(frozen=True)
class BlockTask:
    """One decoder block, by full names of its covered linears, in the order they run.

    linears: the modules, whose `weight` may be replaced and is put right afterwards by the caller. weights: float32
    (N, K), the transformed parent's. formats, ranges (scale float32 (N, K / g), zero uint8 or None), stats: of each.
    forward: hidden (batch, length, hidden) -> output, with the weights that the modules hold; differentiable. inputs:
    what the quantized blocks before this one give, one tensor a batch, on the CPU or wherever they were put. targets:
    what the parent gives behind this block, for the same tokens. seed: for the order of batches.
    """

    linears: Mapping[str, nn.Linear]
    weights: Mapping[str, Tensor]
    formats: Mapping[str, TensorFormat]
    ranges: Mapping[str, tuple[Tensor, Tensor | None]]
    stats: Mapping[str, InputStats]
    forward: Callable[[Tensor], Tensor]
    inputs: Batches
    targets: Batches
    seed: int
