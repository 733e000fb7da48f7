"""Products of inputs: most of the arithmetic of calibration, in one place."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def add_gram(total: Tensor, x: Tensor) -> None:
    """total (K, K) float32 += x^T x, for inputs x (tokens, K) of any floating dtype."""
    x = x.float()
    total.addmm_(x.T, x)
