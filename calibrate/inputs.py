"""What the calibration text shows of a linear's inputs. Each method names the statistics it wants in `NEEDS`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from calibrate.gram import add_gram, mirrored
from calibrate.histogram import Histogram

# kl_hessian also needs `calibrate.sensitivity`, one backward pass through the whole model before the first block
KNOWN = frozenset({"amax", "mean_abs", "second_moment", "hessian", "kl_hessian", "histogram"})


class InputStats:
    """Statistics of the inputs x (tokens, K) that linears fused on one input share, gathered batch by batch.

    num_tokens: how many were seen.
    amax: (K,) float32, the largest magnitude of each input channel.
    mean_abs: (K,) float32, E|x_j|.
    second_moment: (K,) float32, E[x_j^2] over all tokens, accumulated in float64.
    hessian: (K, K) float32, E[x x^T]: that of the squared error of the output, but for a factor 2.
    kl_hessian: (K, K) float32, E[w x x^T], where w says how much the model's output depends on the token.
    histogram: of the magnitudes |x_j| of all channels together.
    notes: what a method found out on the way that the table of layers should say, e.g. the damping it had to use.
    A statistic that nobody asked for is None.
    """

    def __init__(self, needs: Iterable[str], in_features: int, device: torch.device | str = "cpu") -> None:
        self.needs = frozenset(needs)
        assert self.needs <= KNOWN, f"unknown input statistics {sorted(self.needs - KNOWN)}; known: {sorted(KNOWN)}"
        self.num_tokens, self.device = 0, torch.device(device)
        self.notes: dict[str, float] = {}

        def zeros(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
            return torch.zeros(shape, dtype=dtype, device=device) if name in self.needs else None

        self.amax = zeros("amax", in_features)
        self._sum_abs = zeros("mean_abs", in_features, dtype=torch.float64)
        self._gram = zeros("hessian", in_features, in_features)
        self._hessian: Tensor | None = None
        squares = zeros("second_moment", in_features, dtype=torch.float64)
        self._sum_squares = squares if self._gram is None else None  # else it is the diagonal of the Hessian
        self._weighted_gram = zeros("kl_hessian", in_features, in_features)
        self.histogram = Histogram(device) if "histogram" in self.needs else None

    @property
    def mean_abs(self) -> Tensor | None:
        return self._mean(self._sum_abs)

    @property
    def second_moment(self) -> Tensor | None:
        if self._gram is not None:
            return self._mean(self._gram.diagonal())
        return self._mean(self._sum_squares)

    @property
    def hessian(self) -> Tensor | None:
        if self._hessian is None and self._gram is not None:  # large: made once, and anew after a change
            self._hessian = mirrored(self._gram).div_(max(1, self.num_tokens))
        return self._hessian

    @property
    def kl_hessian(self) -> Tensor | None:
        return self._mean(self._weighted_gram)

    def _mean(self, total: Tensor | None) -> Tensor | None:
        return None if total is None else (total / max(1, self.num_tokens)).float()

    @torch.no_grad()
    def update(self, x: Tensor, token_weight: Tensor | None = None) -> None:
        """Add inputs (..., K) of any floating dtype. token_weight: (...) float32, for `kl_hessian`."""
        x, self._hessian = x.flatten(0, -2), None
        self.num_tokens += len(x)
        if self._gram is not None:
            add_gram(self._gram, x)
        if self.needs <= {"hessian", "second_moment"} and self._gram is not None:
            return
        if self.histogram is not None:
            self.histogram.update(x)
        x = x.float()
        if self.amax is not None and len(x):
            self.amax = torch.maximum(self.amax, x.abs().amax(0))
        if self._sum_abs is not None:
            self._sum_abs += x.abs().sum(0).double()
        if self._sum_squares is not None:
            self._sum_squares += x.square().sum(0).double()
        if self._weighted_gram is not None:
            assert token_weight is not None
            self._weighted_gram.addmm_((x * token_weight.flatten()[:, None]).T, x)

    @torch.no_grad()
    def rescale(self, divisor: Tensor) -> None:
        """Bring the statistics in line with inputs x / divisor, divisor (K,) positive.

        Raises ValueError for a histogram: it does not know channels.
        """
        if self.histogram is not None:
            raise ValueError("a histogram cannot be rescaled by channel; gather it after the transform")
        self._hessian = None
        for vector in (self.amax, self._sum_abs):
            if vector is not None:
                vector /= divisor
        if self._sum_squares is not None:
            self._sum_squares /= divisor.double().square()
        for matrix in (self._gram, self._weighted_gram):
            if matrix is not None:
                matrix /= divisor[:, None] * divisor[None, :]

    @torch.no_grad()
    def reduce(self) -> None:
        """Put the statistics of all ranks together; every rank ends with the same. Nothing to do in one process."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        self._hessian = None
        count = torch.tensor([self.num_tokens], dtype=torch.int64, device=self.device)
        dist.all_reduce(count)
        self.num_tokens = int(count.item())
        if self.amax is not None:
            dist.all_reduce(self.amax, dist.ReduceOp.MAX)
        for total in (self._sum_abs, self._sum_squares, self._gram, self._weighted_gram):
            if total is not None:
                dist.all_reduce(total)
        if self.histogram is not None:
            self.histogram.reduce()
