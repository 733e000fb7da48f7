"""The scale of each (row, group) that fits its own codes best: sum(m c w) / sum(m c^2), m an input's second moment.

A few clip ratios give the codes to start from; codes and scale then take turns, each the best for the other. As
`activation`, but the scale ends between the ratios, and a few of them do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from calibrate.inputs import InputStats
from calibrate.range import _refit
from calibrate.range._search import Range, join, start
from calibrate.rows import each
from qat.scheme import Section, TensorFormat

VERSION = 1
NEEDS = {"second_moment"}
DTYPES = {"int4", "int8"}
INPUTS: set[str] = set()


class Options(Section):
    """None."""


def find(weight: Tensor, fmt: TensorFormat, inputs: InputStats | None, options: Options) -> Range:
    """Scale float32 (N, K / g) and zero uint8 or None of a weight float32 (N, K), int4 or int8."""
    assert inputs is not None and inputs.second_moment is not None
    importance = inputs.second_moment.view(-1, fmt.group_of(weight.shape[1]))

    def part(rows: slice) -> Range:
        scale, zero = start(weight[rows], fmt)
        target = weight[rows].T.reshape(*importance.shape, -1)
        scales, zeros = [], []
        for group in range(len(importance)):
            before = _refit.symmetric_zero(fmt) if zero is None else zero[:, group].float()
            found = _refit.refit(target[group], importance[group], scale[:, group], before, fmt)
            scales.append(found[0])
            zeros.append(found[1])
        found_zero = [z.to(torch.uint8) for z in zeros if isinstance(z, Tensor)]
        return torch.stack(scales, 1), torch.stack(found_zero, 1) if found_zero else None

    return join(each(weight, part, copies=3))
