"""Shared by the integer ranges: the widest range, groups that already lie on a grid, the search over clip ratios.

Every candidate is judged by the numbers that would be stored: scale on the 16-bit grid first, then the nearest codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from calibrate.rows import each
from qat.quant import Quantized, dequantize, grouped, max_scale, minmax_scale, quantize, scale_to_grid
from qat.scheme import TensorFormat

Range = tuple[Tensor, Tensor | None]  # scale float32 (N, K / g); zero uint8 (N, K / g), None when symmetric
PROBE = 4  # weights of a group that are looked at before the whole of it


def join(parts: list[Range]) -> Range:
    """One range of the ranges of consecutive rows."""
    scales, zeros = zip(*parts, strict=True)
    return torch.cat(scales), None if zeros[0] is None else torch.cat(zeros)


def widest(weight: Tensor, fmt: TensorFormat, ratio: float = 1.0) -> Range:
    """The range of each (row, group) of a weight (N, K) that holds its extremes times `ratio`."""
    groups = grouped(weight, fmt.group_of(weight.shape[1]))
    if fmt.symmetric:
        return max_scale(groups.abs().amax(-1) * ratio, fmt), None
    return minmax_scale(groups.amin(-1) * ratio, groups.amax(-1) * ratio)


def start(weight: Tensor, fmt: TensorFormat) -> Range:
    """The widest range of each (row, group), or the exact one of a group that already is codes times a scale.

    So a dequantized model comes back unchanged, whichever codes its groups happen to use: the extremes of such a group
    are at most 8 (asymmetric: 15) whole steps apart, and trying each count finds the scale. An ordinary group is given
    up after a look at a few weights. int8 groups are given their widest range: there are 128 counts to try.
    """
    groups = grouped(weight, fmt.group_of(weight.shape[1]))
    scale, zero = widest(weight, fmt)
    if fmt.dtype == "int8":
        return scale, zero
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    span = torch.maximum(-low, high) if fmt.symmetric else high - low
    open_ = torch.ones_like(scale, dtype=torch.bool)
    for steps in range(1, 9 if fmt.symmetric else 16):
        s = scale_to_grid(span / steps)
        z = None if fmt.symmetric else (-low / s).round().clamp(0, 15).to(torch.uint8)
        hit = open_ & _is_exact(groups[..., :PROBE], s, z, fmt)
        if hit.any():
            hit[hit.clone()] = _is_exact(groups[hit], s[hit], None if z is None else z[hit], fmt)
            scale = torch.where(hit, s, scale)
            zero = None if zero is None or z is None else torch.where(hit, z, zero)
            open_ &= ~hit
    return scale, zero


def _is_exact(groups: Tensor, scale: Tensor, zero: Tensor | None, fmt: TensorFormat) -> Tensor:
    """Which of the groups (..., g) their codes at scale (...) reproduce: bool (...)."""
    return (stored(groups, scale, zero, fmt) == groups).all(-1)


def stored(groups: Tensor, scale: Tensor, zero: Tensor | None, fmt: TensorFormat) -> Tensor:
    """What groups (..., g) come back as, from their codes at scale (...)."""
    rows, s = groups.reshape(-1, groups.shape[-1]), scale.reshape(-1, 1)
    z = None if zero is None else zero.reshape(-1, 1)
    return dequantize(Quantized(quantize(rows, s, z, fmt), s, z), fmt).view(groups.shape)


def search(weight: Tensor, fmt: TensorFormat, importance: Tensor | None, ratios: int, smallest: float) -> Range:
    """The clip ratio of each (row, group) with the least squared error, among `ratios` values from 1 to `smallest`.

    weight: float32 (N, K). importance: float32 (K,) multiplies the squared error of each input, None counts all alike.
    Never worse than the widest range; a group whose error cannot be improved (all zero, dead inputs) keeps that.
    """
    size = fmt.group_of(weight.shape[1])
    factor = None if importance is None else importance.view(-1, size)

    def find(which: slice) -> Range:
        rows = weight[which]
        groups = grouped(rows, size)

        def error(scale: Tensor, zero: Tensor | None) -> Tensor:
            square = (stored(groups, scale, zero, fmt) - groups).square_()
            return (square if factor is None else square.mul_(factor)).sum(-1)

        scale, zero = start(rows, fmt)
        best = error(scale, zero)
        for ratio in torch.linspace(1, smallest, ratios).tolist():
            s, z = widest(rows, fmt, ratio)
            now = error(s, z)
            better = now < best
            best = torch.where(better, now, best)
            scale = torch.where(better, s, scale)
            zero = None if zero is None or z is None else torch.where(better, z, zero)
        return scale, zero

    return join(each(weight, find))
