"""Shared by the ranges of activations: the levels of a number format, the clips that are tried, the scale of a clip."""

from __future__ import annotations

import torch
from torch import Tensor

from qat.quant import MIN_SCALE
from qat.scheme import TensorFormat


def levels(fmt: TensorFormat) -> Tensor:
    """The magnitudes that codes have at scale 1, float64, ascending from 0: 0..127 for int8, those of E4M3 for fp8.

    int8 also has -128, which a histogram of magnitudes cannot use.
    """
    if fmt.dtype == "fp8_e4m3":
        return torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    assert fmt.dtype == "int8", f"activations are int8 or fp8_e4m3, not {fmt.dtype}"
    return torch.arange(128, dtype=torch.float64)


def scale_of(clip: Tensor, fmt: TensorFormat) -> Tensor:
    """The float32 scale, any shape, at which the largest code stands for the magnitude `clip`."""
    return (clip.float() / levels(fmt)[-1].item()).clamp_min(MIN_SCALE**2)


def clips(amax: Tensor, candidates: int, smallest: float) -> Tensor:
    """(candidates,) float64 from amax down to amax * smallest, each the same factor below the one before."""
    steps = torch.linspace(0, 1, candidates, dtype=torch.float64)
    return amax.double().cpu() * smallest**steps


def nearest(values: Tensor, scales: Tensor, grid: Tensor) -> Tensor:
    """Which of the levels `grid` (L,) each value (B,) takes at each scale (C,): (C, B) int64."""
    return torch.bucketize(values / scales.double()[:, None], (grid[1:] + grid[:-1]) / 2)
