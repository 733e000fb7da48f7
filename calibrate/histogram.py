"""How often inputs of each magnitude occur: what static scales of activations and of the KV cache are chosen from."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

BINS = 2**15  # one for each magnitude of bfloat16; the last 128 are infinity and the NaNs
FINITE = BINS - 128
CHUNK = {"cpu": 2**18, "cuda": 2**26}  # values counted at once, by device


class Histogram:
    """Counts of |x| rounded to bfloat16: bin i holds what rounds to the magnitude whose bits are i.

    The bins are fixed and 2^-8 wide relative to what they hold, at any size. So inputs in bfloat16 are counted exactly,
    a few outliers a thousand times larger than the rest take no resolution from it, and histograms of several batches
    or ranks add up to that of all, in any order.

    counts: (BINS,) int64. amax: () float32, the largest magnitude before rounding; 0 before anything was seen.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.counts = torch.zeros(BINS, dtype=torch.int64, device=device)
        self.amax = torch.zeros((), device=device)

    @property
    def num_samples(self) -> int:
        return int(self.counts.sum().item())

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Add the magnitudes of x, any shape and floating dtype. Does not wait for the device."""
        if not x.numel():
            return
        x = x.detach().flatten()
        low, high = torch.aminmax(x)
        self.amax = torch.maximum(self.amax, torch.maximum(-low, high).float())
        for part in x.split(CHUNK.get(x.device.type, CHUNK["cpu"])):
            bins = part.bfloat16().view(torch.int16) & 0x7FFF
            if x.device.type == "cpu":
                self.counts += torch.bincount(bins, minlength=BINS)
            else:  # bincount would wait there, to learn the largest bin
                self.counts.scatter_add_(0, bins.long(), self.counts.new_ones(()).expand(len(bins)))

    def seen(self) -> tuple[Tensor, Tensor]:
        """(magnitudes, counts) of the bins that are not empty, float64 on the CPU, ascending; none is over `amax`.

        Raises ValueError when nothing was seen, or a value that is not finite.
        """
        counts = self.counts.cpu()
        if not counts.any():
            raise ValueError(
                "no value was seen, so a static scale cannot be chosen; calibrate on more text, let the scale be "
                "dynamic, or put the layer into scheme.skip"
            )
        if wrong := int(counts[FINITE:].sum()):
            raise ValueError(
                f"{wrong} of {int(counts.sum())} values are not finite; compute in float32 or bfloat16, or choose "
                "another revision of the parent"
            )
        which = counts.nonzero().flatten()
        return magnitudes(which).clamp_max(self.amax.double().cpu()), counts[which].double()

    @torch.no_grad()
    def reduce(self) -> None:
        """Put the counts of all ranks together. Nothing to do in one process."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        dist.all_reduce(self.counts)
        dist.all_reduce(self.amax, dist.ReduceOp.MAX)


def magnitudes(bins: Tensor) -> Tensor:
    """The magnitude, float64, that each bin (int) stands for."""
    return bins.to(torch.int16).view(torch.bfloat16).double()
