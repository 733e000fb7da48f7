"""How often inputs of each magnitude occur: what entropy and percentile calibration of static scales look at."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

BINS = 4096


class Histogram:
    """Counts of |x| in BINS equal bins from 0 to `top`, a power of two that doubles (pairs of bins merge) as needed.

    counts: (BINS,) int64. top: the upper edge of the last bin; 0 before anything was seen.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.counts = torch.zeros(BINS, dtype=torch.int64, device=device)
        self.top = 0.0

    @property
    def num_samples(self) -> int:
        return int(self.counts.sum().item())

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Add the magnitudes of x, any shape and floating dtype."""
        if not x.numel():
            return
        x = x.detach().abs().float().flatten()
        self.widen(x.max().item())
        bins = (
            (x * (BINS / self.top)).long().clamp_max_(BINS - 1) if self.top else torch.zeros_like(x, dtype=torch.long)
        )
        self.counts += torch.bincount(bins, minlength=BINS)

    def widen(self, largest: float) -> None:
        """Make `top` at least `largest`."""
        if largest <= 0:
            return
        if not self.top:
            self.top = 2.0 ** torch.tensor(largest).log2().ceil().item()
        while self.top < largest:
            self.counts = torch.cat([self.counts.view(-1, 2).sum(1), self.counts.new_zeros(BINS // 2)])
            self.top *= 2

    @torch.no_grad()
    def reduce(self) -> None:
        """Put the counts of all ranks together."""
        top = torch.tensor([self.top], dtype=torch.float64, device=self.counts.device)
        dist.all_reduce(top, dist.ReduceOp.MAX)
        self.widen(top.item())
        dist.all_reduce(self.counts)
