"""Channels with large inputs get larger weights before rounding, and so smaller errors (AWQ, Lin et al. 2023).

For the linears W that read one tensor x, from a norm or an earlier linear, equation 4 of the paper looks for

    s = argmin || Q(W s) (x / s) - W x ||^2,    s_j = E|x_j|^a / E_n|W[n, j]|^b

Here the squared error over the calibration text is computed without keeping any x: with H = E[x x^T] and
D = Q(W s) / s - W it is tr(D H D^T), summed over the linears, those of all experts by the tokens they saw. Q is
rounding to nearest at the widest range, on the stored grid of scales; searching a clip in every step gave no lower KL
behind `range: activation` (demo model). The factors judged are those that can be stored (`_fold.allowed`). Exponents
are compared on a sample of rows, and the winner with s = 1 on all of them: by this measure none is never better.

Where we differ from the paper: b is 0 or, with `weight: true`, 1 - a (SmolLM2: KL 0.190 instead of 0.183); the search
goes from a coarse grid to a fine one; s has geometric mean 1, not sqrt(max s min s) = 1, which one dead channel would
decide. A channel never seen gets that mean, so its weights keep their precision; the paper's rule rounds them to 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import torch
from pydantic import Field
from torch import Tensor
from transformers import PretrainedConfig

from calibrate.inputs import InputStats
from calibrate.range._search import start, stored, widest
from calibrate.rows import each
from calibrate.transform import _fold
from calibrate.transform._fold import Factors, Pair
from qat.arch import Arch
from qat.quant import grouped
from qat.scheme import Scheme, Section, TensorFormat

VERSION = 1
NEEDS = {"mean_abs", "hessian"}
DTYPES = {"int4", "int8"}
INPUTS = {"plain"}  # the error of weights only is judged
FLOOR, TINY = 1e-4, 1e-30
SAMPLE = 1024  # rows of a weight, at least, that exponents are compared by; 256 were measured to lose the gain


class Options(Section):
    """grid: exponents a are multiples of 1 / grid. weight: the size of the weights has a say too, with 1 - a."""

    grid: int = Field(20, ge=1)
    weight: bool = False


def rescale(
    weights: dict[str, Tensor],
    inputs: dict[str, InputStats],
    arch: Arch,
    scheme: Scheme,
    options: Options,
    config: PretrainedConfig,
) -> dict[str, Tensor]:
    """See `calibrate.transform.none`. Raises ValueError for quantized inputs, whose error is not looked at here."""
    if scheme.inputs is not None:
        raise ValueError(
            f"calibrate.transform: awq judges the error of weights only, and scheme.inputs is {scheme.inputs}; "
            "use smoothquant or none"
        )
    vectors: dict[str, Tensor] = {}
    for pair in _fold.pairs(weights, inputs, arch, scheme, config):
        vectors |= _fold.fold(pair, weights, search(pair, weights, options))
    return vectors


def search(pair: Pair, weights: Mapping[str, Tensor], options: Options) -> Factors:
    """The storable factors with the least squared error, of the exponents tried; none when that does not lower it."""
    seen, x = _input_size(pair)
    w = _weight_size(pair, weights) if options.weight else torch.ones_like(x)
    tried: dict[int, tuple[float, Factors]] = {}

    def look(steps: Iterable[int]) -> int:
        new: dict[int, Factors] = {}
        for step in steps:
            if step not in tried and 0 <= step <= options.grid:
                a = step / options.grid
                new[step] = _fold.allowed(pair, weights, _normalised(x**a / w ** (1 - a), seen))
        if new:
            found = errors(pair, weights, [one.inputs for one in new.values()], SAMPLE)
            tried.update(zip(new, zip(found, new.values(), strict=True), strict=True))
        return min(tried, key=lambda step: tried[step][0])

    best = look(range(0, options.grid + 1, 4))
    for near in (2, 1):
        best = look((best - near, best + near))
    found, none = tried[best][1], Factors(torch.ones_like(x), torch.ones_like(x))
    error, error_of_none = errors(pair, weights, [found.inputs, none.inputs])
    return found if error < error_of_none else none


def errors(
    pair: Pair, weights: Mapping[str, Tensor], candidates: list[Tensor], sample: int | None = None
) -> list[float]:
    """The squared error of all quantized linears' outputs, summed over tokens, with each of the factors (N,).

    sample: of each weight, count only so many rows (outputs), evenly spread.
    """
    factors = [pair.to_inputs(s) for s in candidates]
    total = [0.0] * len(factors)
    for weight, fmt, stats in _together(pair, weights):
        assert stats.hessian is not None
        rows = weight[:: max(1, len(weight) // sample)] if sample else weight
        parts = each(rows, partial(_lost, rows, factors, fmt, stats.hessian))
        repeated = stats.num_tokens * len(weight) / len(rows)
        total = [sum(found) * repeated + before for before, *found in zip(total, *parts, strict=True)]
    return total


def _lost(weight: Tensor, factors: list[Tensor], fmt: TensorFormat, hessian: Tensor, rows: slice) -> list[float]:
    """tr(D H D^T) of some rows of a weight (N, K), with each of the factors (K,)."""
    part = weight[rows]
    found = []
    for s in factors:
        scaled = part * s
        # a weight that is on a grid already stays there only as it is
        scale, zero = start(scaled, fmt) if bool((s == 1).all()) else widest(scaled, fmt)
        groups = grouped(scaled, fmt.group_of(scaled.shape[1]))
        change = stored(groups, scale, zero, fmt).view(part.shape).div_(s).sub_(part)
        found.append(((change @ hessian) * change).sum(dtype=torch.float64).item())
    return found


def _together(pair: Pair, weights: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, TensorFormat, InputStats]]:
    """Linears with one input and one format as one weight (rows of all, K)."""
    for stats in pair.stats:
        named = [name for name, one in pair.inputs.items() if one is stats]
        for fmt in {str(pair.formats[name]): pair.formats[name] for name in named}.values():
            parts = [weights[f"{name}.weight"] for name in named if pair.formats[name] == fmt]
            yield (torch.cat(parts) if len(parts) > 1 else parts[0]), fmt, stats


def _input_size(pair: Pair) -> tuple[Tensor, Tensor]:
    """Which channels (N,) were ever not zero: bool; and E|x_j| of each: float32, 1 for those that were not."""
    tokens = sum(stats.num_tokens for stats in pair.stats)
    means = [stats.mean_abs * (stats.num_tokens / tokens) for stats in pair.stats if stats.mean_abs is not None]
    x = pair.by_head(torch.stack(means).sum(0)).mean(-2).flatten()
    return x > 0, torch.where(x > 0, x, torch.ones_like(x))


def _weight_size(pair: Pair, weights: Mapping[str, Tensor]) -> Tensor:
    """E_n|W[n, j]| over the quantized linears (N,), each weight as a part of its group's largest.

    At least FLOOR of the largest, so that a column of zeros does not get all of the range.
    """

    def total(weight: Tensor, size: int, rows: slice) -> Tensor:
        groups = grouped(weight[rows], size).abs()
        return (groups / groups.amax(-1, keepdim=True).clamp_min(TINY)).sum(0).flatten()

    sums = []
    for name, fmt in pair.formats.items():
        weight = weights[f"{name}.weight"]
        sums += each(weight, partial(total, weight, fmt.group_of(weight.shape[1])))
    w = pair.by_head(torch.stack(sums).sum(0)).mean(-2).flatten()
    return w.clamp_min((w.max() * FLOOR).clamp_min(TINY))


def _normalised(s: Tensor, seen: Tensor) -> Tensor:
    """s (N,) with geometric mean 1 over the channels `seen`, and 1 for the rest."""
    mean = torch.where(seen, s.log(), torch.zeros_like(s)).sum() / seen.sum().clamp_min(1)
    return torch.where(seen, s / mean.exp(), torch.ones_like(s))
