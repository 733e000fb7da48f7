"""The clip of each (row, group) with the least KL between teacher and student outputs, to second order.

For a row w of a linear, stored as w + e, the KL of the logits grows by about c e H e^T, with H = E[t x x^T] over the
calibration tokens and t the sensitivity of the output to the token (`calibrate.sensitivity`); the row's own factor c
does not change its choice. `activation` looks at the diagonal of E[x x^T] only. Here errors of different inputs may
cancel: starting from the choice by the diagonal, groups are visited in order and each takes the clip ratio that makes
the row's e H e^T least with the others as they are, so no step makes it worse. Any group size.

Costs a forward and a backward pass of the model, a K x K matrix per shared input, and in the search, per weight,
`ratios * sweeps * group_size` multiply-adds.

Static scales of activations and of the KV cache are another thing of the same name: `calibrate.range._entropy`.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from calibrate.histogram import Histogram
from calibrate.inputs import InputStats
from calibrate.range._clip import clips, scale_of
from calibrate.range._entropy import divergence, enough
from calibrate.range._search import Range, join, search, stored, widest
from calibrate.rows import at, each
from qat.scheme import Section, TensorFormat

VERSION = 1
NEEDS = {"kl_hessian"}
DTYPES = {"int4", "int8"}
INPUTS = {"int8", "fp8_e4m3"}


class Options(Section):
    """ratios, smallest: as in `activation`. sweeps: passes over the groups of a row. damping: share of the mean of H's
    diagonal that is added to it, so that directions which the text never shows still count."""

    ratios: int = Field(40, ge=1)
    smallest: float = Field(0.5, gt=0, le=1)
    sweeps: int = Field(2, ge=1)
    damping: float = Field(0.01, ge=0)


class InputOptions(Section):
    """candidates: how many clips are tried, from the largest magnitude down to `smallest` times it, evenly in log."""

    candidates: int = Field(256, ge=1)
    smallest: float = Field(0.004, gt=0, le=1)


def find(weight: Tensor, fmt: TensorFormat, inputs: InputStats | None, options: Options) -> Range:
    """Scale float32 (N, K / g) and zero uint8 or None of a weight float32 (N, K), int4 or int8."""
    assert inputs is not None and inputs.kl_hessian is not None
    hessian = inputs.kl_hessian
    hessian.diagonal().add_(options.damping * hessian.diagonal().mean())
    first = search(weight, fmt, hessian.diagonal(), options.ratios, options.smallest)
    size = fmt.group_of(weight.shape[1])

    def descend(rows: slice) -> Range:
        return _descend(weight[rows], fmt, hessian, (at(first[0], rows), at(first[1], rows)), options)

    # a step holds the weights of one group at every ratio
    return join(each(weight, descend, copies=max(1, options.ratios * size // weight.shape[1])))


def find_input(histogram: Histogram, fmt: TensorFormat, options: InputOptions) -> Tensor:
    """Scale float32 (1,) of inputs with these magnitudes, by entropy calibration.

    Raises ValueError for a histogram that is not finite, or of fewer than `_entropy.LEAST` values.
    """
    values, counts = enough(*histogram.seen())
    tried = clips(histogram.amax, options.candidates, options.smallest)
    best = divergence(values, counts, tried, fmt).argmin() if len(values) else 0
    return scale_of(tried[best].view(1), fmt).to(histogram.counts.device)


def _descend(weight: Tensor, fmt: TensorFormat, hessian: Tensor, first: Range, options: Options) -> Range:
    scale, zero = first[0].clone(), None if first[1] is None else first[1].clone()
    size, every = fmt.group_of(weight.shape[1]), torch.arange(len(weight), device=weight.device)
    ranges = [widest(weight, fmt, ratio) for ratio in torch.linspace(1, options.smallest, options.ratios).tolist()]
    scales = torch.stack([s for s, _ in ranges])  # (ratios, rows, groups)
    zeros = None if zero is None else torch.stack([z for _, z in ranges if z is not None])
    error = stored(weight.view(*scale.shape, size), scale, zero, fmt).view_as(weight) - weight
    pull = error @ hessian  # half the gradient of e H e^T, (rows, K)
    for _ in range(options.sweeps):
        for group in range(scale.shape[1]):
            columns = slice(group * size, (group + 1) * size)
            s, z = scales[..., group], None if zeros is None else zeros[..., group]
            part = weight[:, columns].expand(options.ratios, -1, -1)
            step = stored(part, s, z, fmt) - part - error[:, columns]  # (ratios, rows, g)
            change = ((step @ hessian[columns, columns] + 2 * pull[:, columns]) * step).sum(-1)
            least, best = change.min(0)
            better = least < 0
            taken = step[best, every] * better[:, None]
            error[:, columns] += taken
            pull += taken @ hessian[columns]
            scale[:, group] = torch.where(better, s[best, every], scale[:, group])
            if zero is not None and z is not None:
                zero[:, group] = torch.where(better, z[best, every], zero[:, group])
    return scale, zero
