"""The column loop of GPTQ, and the triangular factor that says where a column's rounding error goes.

Rounding the columns of a weight one after the other, the last first, each to the nearest code of

    t_k = w_k + sum_{j>k} (w_j - q_j) A_jk        with   H = (I + A) D (I + A)^T,   A strictly lower, D diagonal

makes (w - q) H (w - q)^T = sum_k D_k (t_k - q_k)^2 small. It is GPTQ's update (Frantar et al. 2022, algorithm 1) in the
form of Chee et al. 2023, theorem 1: one Cholesky factorisation of H and no inverse.

Everything is transposed, (K, n): a column of the weight is then contiguous. The loop halves its range until few columns
are left, so that all but a few of the K / 2 multiply-adds per weight are in matrix products.
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
    """I + A (K, K) and D (K,), float32, of a Hessian (K, K) whose inputs are put in `order`, the first visited last.

    damping: share of the mean diagonal that is added to the diagonal; ten times as much at each failure. Also returns
    the damping that did. Raises ValueError when the Hessian is not finite, or no damping up to 1 does.
    """
    mean = hessian.diagonal().mean()
    if not torch.isfinite(mean) or not torch.isfinite(hessian.sum()):
        raise ValueError("the Hessian of the inputs is not finite; set compute.dtype to bfloat16 or float32")
    ordered = hessian.index_select(0, order).index_select(1, order)
    diagonal = ordered.diagonal().clone()
    share = damping
    while share <= LARGEST_DAMPING:
        # inputs that are all zero leave nothing to weigh: then every column counts alike
        ordered.diagonal().copy_(diagonal + (share * mean if mean > 0 else 1.0))
        lower, info = torch.linalg.cholesky_ex(ordered)
        pivots = lower.diagonal().clone()
        if not info.item() and torch.isfinite(pivots).all() and (pivots > 0).all():
            return lower.div_(pivots), pivots.square_(), share
        share = max(share * 10, 1e-4)
    raise ValueError(
        f"the Hessian of the inputs has no Cholesky factor at any damping from {damping:g} to {LARGEST_DAMPING:g} of "
        "its mean diagonal; calibrate with more text, or round to nearest"
    )


Choose = Callable[[int], None]  # sets the scale of a group before its first column is rounded


class Sweep:
    """One pass over the columns of some rows, the last column first.

    target: float32 (K, n), becomes the signed codes. error: float32 (K, n), the weight, becomes what is lost. feedback:
    I + A. scales, zeros: of each group, (n,). groups: that of each column.
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
        self.gpu = HAS_TRITON and weight.is_cuda

    def run(self, choose: Choose | None = None) -> None:
        """Round all columns. choose: called with the first column of each group before any of it is rounded; the
        columns of a group must be neighbours."""
        self._halve(0, len(self.target), choose)

    def _halve(self, start: int, stop: int, choose: Choose | None) -> None:
        size = len(self.target) // len(self.scales)
        if choose and stop - start == size:
            choose(start)
            choose = None
        if stop - start <= (BLOCK if self.gpu else FEW) and not choose:
            self._columns(slice(start, stop))
            return
        unit = size if choose else 1  # a group is not torn apart before its scale is chosen
        middle = start + (stop - start) // unit // 2 * unit
        self._halve(middle, stop, choose)
        self.target[start:middle].addmm_(self.feedback[middle:stop, start:middle].T, self.error[middle:stop])
        self._halve(start, middle, choose)

    def _columns(self, part: slice) -> None:
        target, error, groups = self.target[part], self.error[part], self.groups[part]
        # zero where nothing is lost yet: every column takes all rows of `error`, done or not
        feedback = self.feedback[part, part].tril(-1).T.contiguous()
        if self.gpu:
            from calibrate.round import _triton

            scale = torch.stack([self.scales[group] for group in groups])
            zero = [z for group in groups if isinstance(z := self.zeros[group], Tensor)]
            _triton.columns(target, error, feedback, scale, torch.stack(zero) if zero else None, self.fmt)
            return
        lost, columns = error.T, list(zip(groups, target.unbind(0), error.unbind(0), feedback.unbind(0), strict=True))
        for group, code, own, row in reversed(columns):
            code.addmv_(lost, row)
            round_to(code, self.scales[group], self.zeros[group], self.fmt, out=code)
            own.addcmul_(code, self.scales[group], value=-1)
