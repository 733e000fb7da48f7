"""What the calibration text shows of a linear's inputs. Each method names the statistics it wants in `NEEDS`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# kl_hessian also needs `calibrate.sensitivity`, one backward pass through the whole model before the first block
KNOWN = frozenset({"amax", "second_moment", "kl_hessian"})


class InputStats:
    """Statistics of the inputs x (tokens, K) that linears fused on one input share, gathered batch by batch.

    num_tokens: how many were seen.
    amax: (K,) float32, the largest magnitude of each input channel.
    second_moment: (K,) float32, E[x_j^2] over all tokens, accumulated in float64.
    kl_hessian: (K, K) float32, E[w x x^T], where w says how much the model's output depends on the token.
    A statistic that nobody asked for is None.
    """

    def __init__(self, needs: Iterable[str], in_features: int, device: torch.device | str = "cpu") -> None:
        self.needs = frozenset(needs)
        assert self.needs <= KNOWN, f"unknown input statistics {sorted(self.needs - KNOWN)}; known: {sorted(KNOWN)}"
        self.num_tokens = 0
        self.amax = torch.zeros(in_features, device=device) if "amax" in self.needs else None
        self._squares = torch.zeros(in_features, dtype=torch.float64, device=device)
        side = in_features if "kl_hessian" in self.needs else 0
        self._products = torch.zeros(side, side, device=device)

    @property
    def second_moment(self) -> Tensor | None:
        if "second_moment" not in self.needs:
            return None
        return (self._squares / max(1, self.num_tokens)).float()

    @property
    def kl_hessian(self) -> Tensor | None:
        if "kl_hessian" not in self.needs:
            return None
        return self._products / max(1, self.num_tokens)

    @torch.no_grad()
    def update(self, x: Tensor, token_weight: Tensor | None = None) -> None:
        """Add inputs (..., K) of any floating dtype. token_weight: (...) float32, for `kl_hessian`."""
        x = x.flatten(0, -2).float()
        self.num_tokens += len(x)
        if self.amax is not None:
            self.amax = torch.maximum(self.amax, x.abs().amax(0))
        if "second_moment" in self.needs:
            self._squares += x.square().sum(0).double()
        if "kl_hessian" in self.needs:
            assert token_weight is not None
            self._products.addmm_((x * token_weight.flatten()[:, None]).T, x)
