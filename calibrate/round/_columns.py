"""The column loop of GPTQ, and the triangular factor that says where a column's rounding error goes.

Rounding the columns of a weight one after the other, each to the nearest code of

    t_k = w_k + sum_{j<k} (w_j - q_j) A_jk        with   H = (I + A) D (I + A)^T,   A strictly upper, D diagonal

makes (w - q) H (w - q)^T = sum_k D_k (t_k - q_k)^2 small. It is GPTQ's update (Frantar et al. 2022, algorithm 1) in the
form of Chee et al. 2023, theorem 1: one Cholesky factorisation of H, read backwards, and no inverse.

Everything is transposed, (K, n): a column of the weight is then contiguous. The loop halves its range until few columns
are left, so that all but (few - 1) / 2 of the K / 2 multiply-adds per weight are in matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from calibrate.range._refit import Zero, round_to
from qat.scheme import TensorFormat

FEW = 16  # columns that are done one by one
BLOCK = 128  # columns that one Triton program does in registers
HAS_TRITON = find_spec("triton") is not None
LARGEST_DAMPING = 1.0


def factor(hessian: Tensor, order: Tensor, damping: float) -> tuple[Tensor, Tensor, float]:
    """The feedback A^T (K, K) float32 and D (K,) of a Hessian (K, K) whose inputs are visited in `order`.

    damping: share of the mean diagonal that is added to the diagonal; ten times as much at each failure. Also returns
    the damping that did. Raises ValueError when the Hessian is not finite, or no damping up to 1 does.
    """
    mean = hessian.diagonal().mean()
    if not torch.isfinite(mean) or not torch.isfinite(hessian.sum()):
        raise ValueError("the Hessian of the inputs is not finite; set compute.dtype to bfloat16 or float32")
    backwards = order.flip(0)
    share = damping
    while share <= LARGEST_DAMPING:
        damped = hessian[backwards[:, None], backwards]
        # inputs that are all zero leave nothing to weigh: then every column counts alike
        damped.diagonal().add_(share * mean if mean > 0 else 1.0)
        lower, info = torch.linalg.cholesky_ex(damped)
        pivots = lower.diagonal().flip(0)
        if not info.item() and torch.isfinite(lower).all() and (pivots > 0).all():
            return (lower.flip(0, 1).T / pivots[:, None]).contiguous(), pivots.square(), share
        share = max(share * 10, 1e-4)
    raise ValueError(
        f"the Hessian of the inputs has no Cholesky factor at any damping from {damping:g} to {LARGEST_DAMPING:g} of "
        "its mean diagonal; calibrate with more text, or round to nearest"
    )


Choose = Callable[[int], None]  # sets the scale of a group before its first column is rounded


class Sweep:
    """One pass over the columns of some rows, in the order of visits.

    target: float32 (K, n), becomes the signed codes. error: float32 (K, n), the weight, becomes what is lost. feedback:
    A^T. scales, zeros: of each group, (n,). groups: that of each column. whole: groups are visited one after the other,
    and `choose(first column)` is called before each.
    """

    def __init__(
        self,
        weight: Tensor,
        feedback: Tensor,
        scales: list[Tensor],
        zeros: list[Zero],
        groups: Sequence[int],
        fmt: TensorFormat,
    ) -> None:
        self.target, self.error, self.feedback = weight.clone(), weight, feedback
        self.scales, self.zeros, self.groups, self.fmt = scales, zeros, groups, fmt

    def run(self, choose: Choose | None = None) -> None:
        """Round all columns. choose: groups must be visited one after the other."""
        self._halve(0, len(self.target), choose)

    def _halve(self, start: int, stop: int, choose: Choose | None) -> None:
        size = len(self.target) // len(self.scales)
        if choose and stop - start == size:
            choose(start)
            choose = None
        many = (stop - start) // size if choose else 0
        few = BLOCK if HAS_TRITON and self.target.is_cuda else FEW
        if stop - start <= few and not choose:
            self._columns(start, stop)
            return
        middle = start + (many // 2 * size if choose else (stop - start) // 2)
        self._halve(start, middle, choose)
        self.target[middle:stop].addmm_(self.feedback[middle:stop, start:middle], self.error[start:middle])
        self._halve(middle, stop, choose)

    def _columns(self, start: int, stop: int) -> None:
        part, groups = slice(start, stop), self.groups[start:stop]
        target, error, feedback = self.target[part], self.error[part], self.feedback[part, part]
        if HAS_TRITON and target.is_cuda:
            from calibrate.round import _triton

            scale = torch.stack([self.scales[group] for group in groups])
            zero = [z for group in groups if isinstance(z := self.zeros[group], Tensor)]
            _triton.columns(target, error, feedback, scale, torch.stack(zero) if zero else None, self.fmt)
            return
        for k, (group, code, lost) in enumerate(zip(groups, target.unbind(0), error.unbind(0), strict=True)):
            if k:
                code.addmv_(error[:k].T, feedback[k, :k])
            round_to(code, self.scales[group], self.zeros[group], self.fmt, out=code)
            lost.addcmul_(code, self.scales[group], value=-1)
