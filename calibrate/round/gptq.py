"""GPTQ: each weight is rounded so as to make up for the errors of those before it (Frantar et al. 2022).

For a row w stored as q it makes (w - q) H (w - q)^T small, H = E[x x^T] of the inputs: the squared error of the output.
Where we differ: see `_columns` for the form of the update; groups are those of the stored order, whatever the order of
visits, so no g_idx is needed; and with `refit` the scale of a group is chosen when its turn comes, for the weights that
the errors before it have changed, not for those of the parent. Groups then go by their share of the Hessian's diagonal,
and the columns within by the diagonal. Without it, columns go by the diagonal alone, at the scales given.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from calibrate.inputs import InputStats
from calibrate.range._refit import Zero, refit, symmetric_zero
from calibrate.round._columns import Sweep, factor
from calibrate.rows import at
from qat.quant import Quantized
from qat.scheme import Section, TensorFormat

VERSION = 1
NEEDS = {"hessian"}
DTYPES = {"int4", "int8"}
PREFIX = True
ROWS = 2**15  # at once: two float32 copies of them are made


class Options(Section):
    """damping: share of the mean of H's diagonal that is added to it; ten times as much as often as H has no Cholesky
    factor. act_order: visit inputs by falling second moment, else as they are stored. refit: choose each group's scale
    (and zero point) when its turn comes, which makes up for a range that did not look at the inputs; not better than
    `range: activation` (SmolLM2: KL 0.155 against 0.135)."""

    damping: float = Field(0.01, ge=0, le=1)
    act_order: bool = True
    refit: bool = False


@torch.no_grad()
def codes(
    weight: Tensor, scale: Tensor, zero: Tensor | None, fmt: TensorFormat, inputs: InputStats | None, options: Options
) -> Quantized:
    """Codes of a weight float32 (N, K), the rows of all linears that share the input.

    scale: float32 (N, K / g). zero: uint8 (N, K / g) or None. Inputs that were always zero are rounded to nearest; all
    are, when all were. `inputs.notes["damping"]` says which damping was used. Raises ValueError when no token was seen,
    or H has no factor at any damping.
    """
    assert inputs is not None
    hessian = inputs.hessian  # made anew at each call
    assert hessian is not None
    if not inputs.num_tokens:
        raise ValueError("no token of the calibration text came here; use more text, or round to nearest")
    order = order_of(hessian.diagonal(), scale.shape[1], options)
    feedback, pivots, damping = factor(hessian, order, options.damping)
    inputs.notes["damping"] = damping

    def solve(rows: slice) -> Quantized:
        return _solve(weight[rows], scale[rows], at(zero, rows), fmt, order, feedback, pivots, options.refit)

    # threads do better inside: in matrix products, and over the rows of a refit
    parts = [solve(slice(start, start + ROWS)) for start in range(0, len(weight), ROWS)]
    zeros = None if zero is None else torch.cat([part.zero for part in parts if part.zero is not None])
    return Quantized(torch.cat([part.codes for part in parts]), torch.cat([part.scale for part in parts]), zeros)


def order_of(diagonal: Tensor, groups: int, options: Options) -> Tensor:
    """The inputs, int64 (K,), in an order of which the last is visited first."""
    inputs = torch.arange(len(diagonal), device=diagonal.device)
    if not options.act_order:
        return inputs.flip(0)
    if not options.refit:
        return diagonal.argsort(stable=True)
    by_group = diagonal.view(groups, -1)
    inside = by_group.argsort(dim=1, stable=True)
    return inputs.view(groups, -1).gather(1, inside)[by_group.sum(1).argsort(stable=True)].flatten()


def _solve(
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    fmt: TensorFormat,
    order: Tensor,
    feedback: Tensor,
    pivots: Tensor,
    refitting: bool,
) -> Quantized:
    scales = list(scale.T.contiguous().unbind(0))
    zeros: list[Zero] = [symmetric_zero(fmt)] * len(scales)
    if zero is not None:
        zeros = list(zero.T.float().contiguous().unbind(0))
    size = len(order) // len(scales)
    sweep = Sweep(weight.T[order].contiguous(), feedback, scales, zeros, (order // size).tolist(), fmt)

    def choose(start: int) -> None:
        group, part = sweep.groups[start], slice(start, start + size)
        scales[group], zeros[group] = refit(sweep.target[part], pivots[part], scales[group], zeros[group], fmt)

    sweep.run(choose if refitting else None)
    found = torch.stack(scales, 1)
    found_zero = None if zero is None else torch.stack([z for z in zeros if isinstance(z, Tensor)], 1)
    signed = torch.empty(sweep.target.shape, dtype=torch.int8, device=weight.device)
    signed[order] = sweep.target.to(torch.int8)  # in the stored order
    stored = to_codes(signed.T.contiguous(), found_zero, fmt)
    return Quantized(stored, found, None if found_zero is None else found_zero.to(torch.uint8))


def to_codes(signed: Tensor, zero: Tensor | None, fmt: TensorFormat) -> Tensor:
    """What is stored of signed codes (N, K) int8: uint8 with the zero point added for int4, themselves for int8."""
    if fmt.bits == 8:
        return signed
    if zero is None:
        return (signed + int(symmetric_zero(fmt))).to(torch.uint8)
    return (signed.view(*zero.shape, -1) + zero.to(torch.int8)[..., None]).to(torch.uint8).view(signed.shape)
