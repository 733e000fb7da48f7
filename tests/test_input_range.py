"""Static scales of activations against slow loops, numpy's percentiles and torch's own fp8 and KL."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from calibrate.histogram import Histogram
from calibrate.range import _entropy, kl, mse, percentile
from calibrate.range import max as widest
from calibrate.range._clip import clips, levels, nearest, scale_of
from qat import plugins
from qat.quant import max_scale
from qat.scheme import TensorFormat

FP8 = TensorFormat(dtype="fp8_e4m3", per="tensor")
INT8 = TensorFormat.model_construct(dtype="int8", per="tensor", group_size=None, symmetric=True, dynamic=False)
FORMATS = pytest.mark.parametrize("fmt", [FP8, INT8], ids=["fp8", "int8"])
seeds = st.integers(0, 2**31)


def random(seed: int, size: int, degrees: float = 4.0) -> Tensor:
    """Student-t values in bfloat16, a tenth of them zero: heavy tails, so that clipping pays for int8."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(size, generator=generator)
    chi2 = torch.randn(size, int(degrees), generator=generator).square().sum(1) / degrees
    return torch.where(torch.rand(size, generator=generator) < 0.1, 0, normal / chi2.sqrt()).bfloat16()


def counted(x: Tensor) -> Histogram:
    histogram = Histogram()
    histogram.update(x)
    return histogram


def stored(x: Tensor, scale: Tensor, fmt: TensorFormat) -> Tensor:
    if fmt.dtype == "int8":
        return (x.float() / scale).round().clamp(-127, 127) * scale
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


@FORMATS
@settings(max_examples=20, deadline=None)
@given(seed=seeds, scale=st.floats(1e-4, 100))
def test_levels_are_where_the_format_rounds_to(fmt: TensorFormat, seed: int, scale: float) -> None:
    x, s = random(seed, 200).abs().float(), torch.tensor([scale])
    grid = levels(fmt)
    ours = grid[nearest(x.double(), s, grid)[0]] * s.double()
    theirs = stored(x, s, fmt).double()
    # theirs is a float32 product of up to 448 * scale
    torch.testing.assert_close((ours - x).abs(), (theirs - x).abs(), rtol=1e-4, atol=1e-4 * scale)


def test_max_is_the_largest_value_over_the_largest_code() -> None:
    x = random(0, 500).float() * 1.00371
    assert torch.equal(widest.find_input(counted(x), FP8, widest.InputOptions()), x.abs().max().view(1) / 448)
    assert torch.equal(widest.find_input(counted(x), INT8, widest.InputOptions()), x.abs().max().view(1) / 127)
    assert torch.equal(scale_of(x, FP8), max_scale(x, FP8))


@FORMATS
@settings(max_examples=30, deadline=None)
@given(seed=seeds, share=st.floats(0.1, 100), size=st.integers(1, 5000))
def test_percentile_is_that_of_numpy(fmt: TensorFormat, seed: int, share: float, size: int) -> None:
    x = random(seed, size)
    found = percentile.find_input(counted(x), fmt, percentile.InputOptions(percentile=share))
    expected = np.percentile(x.abs().double().numpy(), share, method="inverted_cdf")
    torch.testing.assert_close(found, scale_of(torch.tensor([expected]), fmt), rtol=1e-6, atol=0)


@FORMATS
@settings(max_examples=15, deadline=None)
@given(seed=seeds)
def test_mse_finds_what_quantizing_the_values_at_each_clip_finds(fmt: TensorFormat, seed: int) -> None:
    x = random(seed, 3000)
    found = mse.find_input(counted(x), fmt, mse.InputOptions(candidates=40, smallest=0.02))
    tried = [x.abs().max().item() * 0.02 ** (step / 39) / levels(fmt)[-1].item() for step in range(40)]
    errors = [((stored(x, torch.tensor(s), fmt) - x.float()).double() ** 2).sum().item() for s in tried]
    mine = ((stored(x, found, fmt) - x.float()).double() ** 2).sum().item()
    assert mine == pytest.approx(min(errors), rel=1e-4)


def slow_divergence(x: list[float], clip: float, fmt: TensorFormat) -> float:
    """KL(P || Q) of one clip, from the values themselves; every bin is one bfloat16 magnitude."""
    scale, grid = scale_of(torch.tensor(clip), fmt).item(), levels(fmt).tolist()
    counts: dict[float, int] = {}
    for value in x:
        if value > 0:
            counts[value] = counts.get(value, 0) + 1
    inside = sorted(value for value in counts if value <= clip)
    cells: dict[int, list[float]] = {}
    for value in inside:
        cells.setdefault(min(range(len(grid)), key=lambda i: abs(grid[i] * scale - value)), []).append(value)

    def width(value: float) -> float:
        exponent = math.frexp(value)[1] - 1
        up = 2.0 ** (exponent - 7)
        return (up + (up / 2 if value == 2.0**exponent else up)) / 2

    p = {value: float(counts[value]) for value in inside}
    p[inside[-1]] += sum(counts[value] for value in counts if value > clip)
    q = {}
    for members in cells.values():
        mass, wide = sum(counts[v] for v in members), sum(map(width, members))
        q.update({v: mass * width(v) / wide for v in members})
    total_p, total_q = sum(p.values()), sum(q.values())
    ours = sum(p[v] / total_p * math.log(p[v] / total_p / (q[v] / total_q)) for v in inside)
    kept_p, kept_q = (torch.tensor([side[v] for v in inside], dtype=torch.float64) for side in (p, q))
    theirs = functional.kl_div((kept_q / total_q).log(), kept_p / total_p, reduction="sum").item()
    assert ours == pytest.approx(theirs, abs=1e-9)
    return theirs


@FORMATS
@pytest.mark.parametrize("seed", [0, 1])
def test_divergence_is_that_of_a_slow_loop(fmt: TensorFormat, seed: int) -> None:
    x = random(seed, 2500).abs()
    histogram = counted(x)
    tried = clips(histogram.amax, 12, 0.01)
    fast = _entropy.divergence(*_entropy.enough(*histogram.seen()), tried, fmt)
    slow = [slow_divergence(x.double().tolist(), clip, fmt) for clip in tried.tolist()]
    torch.testing.assert_close(fast, torch.tensor(slow, dtype=torch.float64), rtol=1e-6, atol=1e-9)
    found = kl.find_input(histogram, fmt, kl.InputOptions(candidates=12, smallest=0.01))
    assert torch.equal(found, scale_of(tried[slow.index(min(slow))].view(1), fmt))


@FORMATS
def test_entropy_of_what_the_format_holds_exactly_is_nothing_at_the_widest_clip(fmt: TensorFormat) -> None:
    codes = levels(fmt)[torch.randint(0, len(levels(fmt)), (5000,), generator=torch.Generator().manual_seed(0))]
    codes[0] = levels(fmt)[-1]
    values, counts = _entropy.enough(*counted(codes * 0.25).seen())
    tried = clips(levels(fmt)[-1] * 0.25, 30, 0.1)
    found = _entropy.divergence(values, counts, tried, fmt)
    assert abs(found[0].item()) < 1e-12 and (found[1:] > 1e-3).all()


def test_clipping_has_a_price_and_outliers_are_clipped() -> None:
    x = random(3, 200_000, degrees=30)
    histogram = counted(x)
    values, counts = histogram.seen()
    divergence = _entropy.divergence(*_entropy.enough(values, counts), clips(histogram.amax, 200, 0.001), INT8)
    assert divergence[-1] > 10 * divergence.min()  # not the smallest clip, which costs nothing if Q got the tail too
    x[0] = 200 * x.abs().max()
    clipped = kl.find_input(counted(x), INT8, kl.InputOptions())
    wide = widest.find_input(counted(x), INT8, widest.InputOptions())
    assert clipped < wide / 50
    error = [(stored(x, scale, INT8) - x.float())[1:].square().mean() for scale in (clipped, wide)]
    assert error[0] < error[1] / 100


@settings(max_examples=20, deadline=None)
@given(seed=seeds, power=st.integers(-20, 20))
@pytest.mark.parametrize("name", ["max", "mse", "kl", "percentile"])
def test_a_power_of_two_scales_the_scale(name: str, seed: int, power: int) -> None:
    module = plugins.find("calibrate.range", name)
    x, options = random(seed, 3000), module.InputOptions()
    one, other = (module.find_input(counted(x * factor), INT8, options) for factor in (1, 2.0**power))
    torch.testing.assert_close(one * 2.0**power, other, rtol=1e-6, atol=0)


@FORMATS
@pytest.mark.parametrize("name", ["max", "mse", "kl", "percentile"])
def test_zeros_and_nothing(name: str, fmt: TensorFormat) -> None:
    module = plugins.find("calibrate.range", name)
    scale = module.find_input(counted(torch.zeros(2000)), fmt, module.InputOptions())
    assert scale.shape == (1,) and scale.dtype == torch.float32 and scale > 2.0**-126
    for bad, why in ((torch.zeros(0), "no value was seen"), (torch.full((2000,), torch.nan), "not finite")):
        with pytest.raises(ValueError, match=why):
            module.find_input(counted(bad), fmt, module.InputOptions())


@pytest.mark.parametrize(("size", "zeros"), [(999, 0), (999, 5000), (0, 900)])
def test_entropy_of_few_values_is_refused(size: int, zeros: int) -> None:
    x = torch.cat([torch.ones(size), torch.zeros(zeros)])
    with pytest.raises(ValueError, match=rf"needs 1000 values .* saw {size} \(and {zeros} zeros\).* mse or max"):
        kl.find_input(counted(x), FP8, kl.InputOptions())
    kl.find_input(counted(torch.ones(1000)), FP8, kl.InputOptions())
