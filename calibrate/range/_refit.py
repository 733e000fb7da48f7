"""The scale that serves given weights best, found while they are being rounded: clip ratios first, least squares after.

Works on one group of all rows, transposed: target (g, n) float32, one column per row of the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qat.quant import max_scale, minmax_scale, scale_to_grid
from qat.scheme import TensorFormat

RATIOS = (1.0, 0.9, 0.8, 0.7)
STEPS = 2  # of least squares, each with the codes of the one before
CHUNK = 2**15
Zero = Tensor | float  # float32 (n,), or the same for all rows


def symmetric_zero(fmt: TensorFormat) -> float:
    """The zero point of a symmetric integer format: codes run from -zero to 2^bits - 1 - zero."""
    return 2.0 ** (fmt.bits - 1)


def refit(target: Tensor, importance: Tensor, scale: Tensor, zero: Zero, fmt: TensorFormat) -> tuple[Tensor, Zero]:
    """The scale (n,) on the stored grid, and the zero point, with the least squared error of nearest codes.

    Minimises sum_j importance[j] (target[j] - scale * code[j])^2 over the widest range of the target times RATIOS, then
    over the least-squares scale of the best candidate's codes, sum(i c t) / sum(i c^2),
    STEPS times. scale, zero: kept
    where nothing is better. importance: (g,) float32, at least 0. fmt: int4 or int8, per group or channel.
    """

    def part(rows: slice) -> tuple[Tensor, Zero]:
        return _refit(target[:, rows], importance, scale[rows], zero if isinstance(zero, float) else zero[rows], fmt)

    # on a CPU, as many weights as stay in a core's cache, and as torch does not split over threads
    step = target.shape[1] if target.is_cuda else max(1, CHUNK // len(target))
    parts = [part(slice(start, start + step)) for start in range(0, target.shape[1], step)]
    scales, zeros = zip(*parts, strict=True)
    return torch.cat(scales), zero if isinstance(zero, float) else torch.cat(zeros)


def _refit(target: Tensor, importance: Tensor, scale: Tensor, zero: Zero, fmt: TensorFormat) -> tuple[Tensor, Zero]:
    target = target.contiguous()
    codes, lost = torch.empty_like(target), torch.empty_like(target)
    weighted = target * importance[:, None]

    def error(s: Tensor, z: Zero) -> Tensor:
        round_to(target, s, z, fmt, out=codes)
        torch.addcmul(target, codes, s, value=-1, out=lost)
        return importance @ lost.square_()

    best = error(scale, zero)
    high, low = target.amax(0), target.amin(0)
    for ratio in RATIOS:
        s, z = _widest(low * ratio, high * ratio, zero, fmt)
        best, scale, zero = _better(error(s, z), s, z, best, scale, zero)
    round_to(target, scale, zero, fmt, out=codes)
    for _ in range(STEPS):
        up, down = (codes * weighted).sum(0), importance @ codes.square()
        s = scale_to_grid(torch.where((up > 0) & (down > 0), up / down, scale))
        best, scale, zero = _better(error(s, zero), s, zero, best, scale, zero)
    return scale, zero


def _widest(low: Tensor, high: Tensor, zero: Zero, fmt: TensorFormat) -> tuple[Tensor, Zero]:
    if isinstance(zero, float):
        return max_scale(torch.maximum(high, -low), fmt), zero
    scale, codes = minmax_scale(low, high)
    return scale, codes.float()


def _better(error: Tensor, s: Tensor, z: Zero, best: Tensor, scale: Tensor, zero: Zero) -> tuple[Tensor, Tensor, Zero]:
    better = error < best
    if isinstance(zero, Tensor):
        zero = torch.where(better, z, zero)
    return torch.minimum(best, error), torch.where(better, s, scale), zero


def round_to(target: Tensor, scale: Tensor, zero: Zero, fmt: TensorFormat, out: Tensor) -> Tensor:
    """Nearest codes, signed: what multiplies the scale. float32, of the target's shape (..., n)."""
    return torch.div(target, scale, out=out).round_().clamp_(-zero, 2**fmt.bits - 1 - zero)
