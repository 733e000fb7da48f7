"""Ranges against slow loops: one (row, group) at a time, one candidate at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from calibrate.inputs import InputStats
from calibrate.range import activation, kl, mse
from calibrate.range import max as widest
from calibrate.round import nearest
from qat import plugins
from qat.quant import MIN_SCALE, Quantized, dequantize, quantize, to_grid
from qat.scheme import TensorFormat

SYMMETRIC = TensorFormat(group_size=8)
ASYMMETRIC = TensorFormat(group_size=8, symmetric=False)
CHANNEL = TensorFormat()
FORMATS = [SYMMETRIC, ASYMMETRIC, CHANNEL, TensorFormat(symmetric=False)]
seeds = st.integers(0, 2**31)


def random(seed: int, *shape: int) -> Tensor:
    """Heavy-tailed values, so that clipping pays."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    return x * torch.rand(shape, generator=generator).clamp_min(0.05).reciprocal() * 0.02


def watched(seed: int, width: int, needs: set[str]) -> tuple[Tensor, InputStats]:
    """Correlated inputs (tokens, K) with channels of very different size, and their statistics."""
    x = random(seed, 64, width) @ random(seed + 1, width, width) * 40
    stats = InputStats(needs, width)
    for part in x.split(20):
        stats.update(part, torch.ones(len(part)))
    return x, stats


def on_grid_weight(seed: int, fmt: TensorFormat, rows: int = 6, width: int = 24) -> tuple[Quantized, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    groups = width // fmt.group_of(width)
    scale = to_grid(2.0 ** (-13 + 10 * torch.rand(rows, groups, generator=generator)))
    zero = None if fmt.symmetric else torch.randint(0, 16, (rows, groups), generator=generator, dtype=torch.uint8)
    codes = torch.randint(0, 16, (rows, width), generator=generator, dtype=torch.uint8)
    q = Quantized(codes, scale, zero)
    return q, dequantize(q, fmt)


def stored(weight: Tensor, fmt: TensorFormat, found: tuple[Tensor, Tensor | None]) -> Tensor:
    options = nearest.Options()
    return dequantize(nearest.codes(weight, *found, fmt, None, options), fmt)


def slow_search(weight: Tensor, fmt: TensorFormat, importance: Tensor, ratios: int, smallest: float) -> Tensor:
    """The least weighted squared error of each (row, group), in float64."""
    size = fmt.group_of(weight.shape[1])
    best = torch.full((len(weight), weight.shape[1] // size), torch.inf, dtype=torch.float64)
    for row in range(len(weight)):
        for j in range(best.shape[1]):
            w, h = weight[row, j * size : (j + 1) * size], importance[j * size : (j + 1) * size].double()
            for i in range(ratios):
                ratio = 1 - i * (1 - smallest) / max(1, ratios - 1)
                low, high = min(0.0, w.min().item() * ratio), max(0.0, w.max().item() * ratio)
                step = w.abs().max() * ratio / 7.5 if fmt.symmetric else torch.tensor((high - low) / 15)
                scale = to_grid(step.clamp_min(MIN_SCALE))
                zero = 8 if fmt.symmetric else min(15, max(0, round(-low / scale.item())))
                codes = ((w / scale).round() + zero).clamp(0, 15)
                error = (((codes - zero) * scale - w).double() ** 2 * h).sum()
                best[row, j] = min(best[row, j], error)
    return best


def errors(weight: Tensor, back: Tensor, fmt: TensorFormat, importance: Tensor) -> Tensor:
    square = (back - weight).double() ** 2 * importance.double()
    return square.view(len(weight), -1, fmt.group_of(weight.shape[1])).sum(-1)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_search_finds_what_a_slow_loop_finds(fmt: TensorFormat, weighted: bool) -> None:
    weight = random(3, 5, 24)
    _, stats = watched(4, 24, {"second_moment"})
    importance = stats.second_moment if weighted else torch.ones(24)
    assert importance is not None
    module = activation if weighted else mse
    found = module.find(weight, fmt, stats, module.Options(ratios=21, smallest=0.5))
    expected = slow_search(weight, fmt, importance, 21, 0.5)
    torch.testing.assert_close(errors(weight, stored(weight, fmt, found), fmt, importance), expected, rtol=2e-3, atol=0)


@settings(max_examples=40, deadline=None)
@given(seeds, st.sampled_from(FORMATS))
def test_no_group_is_worse_than_with_the_widest_range(seed: int, fmt: TensorFormat) -> None:
    weight = random(seed, 4, 24)
    _, stats = watched(seed, 24, {"second_moment"})
    plain = stored(weight, fmt, widest.find(weight, fmt, None, widest.Options()))
    for module, importance in ((mse, torch.ones(24)), (activation, stats.second_moment)):
        back = stored(weight, fmt, module.find(weight, fmt, stats, module.Options()))
        assert importance is not None
        assert (errors(weight, back, fmt, importance) <= errors(weight, plain, fmt, importance) * (1 + 1e-5)).all()


@settings(max_examples=60, deadline=None)
@given(seeds, st.sampled_from(FORMATS))
def test_codes_survive_dequantizing(seed: int, fmt: TensorFormat) -> None:
    q, weight = on_grid_weight(seed, fmt)
    assert torch.equal(quantize(weight, q.scale, q.zero, fmt), q.codes)


@settings(max_examples=40, deadline=None)
@given(seeds, st.sampled_from(FORMATS))
def test_a_weight_already_on_a_grid_comes_back_exactly(seed: int, fmt: TensorFormat) -> None:
    _, weight = on_grid_weight(seed, fmt)
    _, stats = watched(seed, 24, {"second_moment", "kl_hessian"})
    for module in (widest, mse, activation, kl):
        assert torch.equal(stored(weight, fmt, module.find(weight, fmt, stats, module.Options())), weight), module


@pytest.mark.parametrize("fmt", [SYMMETRIC, ASYMMETRIC], ids=str)
@pytest.mark.parametrize("name", ["max", "mse", "activation", "kl"])
def test_zero_rows_zero_groups_and_dead_channels(fmt: TensorFormat, name: str) -> None:
    module = plugins.find("calibrate.range", name)
    weight = random(5, 4, 24)
    weight[1], weight[2, 8:16] = 0, 0
    x, stats = random(6, 30, 24), InputStats({"second_moment", "kl_hessian"}, 24)
    x[:, 3], x[:, 16:] = 0, 0
    stats.update(x, torch.ones(30))
    scale, zero = module.find(weight, fmt, stats, module.Options())
    assert torch.isfinite(scale).all() and scale.min() >= MIN_SCALE
    assert torch.equal(scale, to_grid(scale))
    for row, group in ((1, 0), (1, 1), (1, 2), (2, 1)):
        assert scale[row, group] == MIN_SCALE
        codes = quantize(weight, scale, zero, fmt)[row, group * 8 : group * 8 + 8]
        assert (codes == (8 if zero is None else zero[row, group])).all()
    # inputs that are always zero say nothing: the widest range stays
    plain, _ = widest.find(weight, fmt, None, widest.Options())
    if name == "activation":
        assert torch.equal(scale[:, 2], plain[:, 2])


def test_inputs_never_seen_leave_the_widest_range() -> None:
    weight, stats = random(7, 3, 16), InputStats({"second_moment", "kl_hessian"}, 16)
    plain, _ = widest.find(weight, SYMMETRIC, None, widest.Options())
    for module in (activation, kl):
        assert torch.equal(module.find(weight, SYMMETRIC, stats, module.Options())[0], plain)


@settings(max_examples=20, deadline=None)
@given(seeds, st.sampled_from(FORMATS))
def test_kl_lowers_the_output_error_of_every_row(seed: int, fmt: TensorFormat) -> None:
    weight = random(seed, 4, 24)
    x, stats = watched(seed, 24, {"kl_hessian"})
    options = kl.Options(damping=0)
    hessian = stats.kl_hessian
    assert hessian is not None
    diagonal = InputStats({"second_moment"}, 24)
    diagonal.update(x)

    def output_error(module: object, given: InputStats, chosen: object) -> Tensor:
        found = module.find(weight, fmt, given, chosen)  # type: ignore[attr-defined]
        return ((stored(weight, fmt, found) - weight).double() @ x.double().T).square().sum(-1)

    before = output_error(activation, diagonal, activation.Options())
    assert (output_error(kl, stats, options) <= before * (1 + 1e-3) + 1e-12).all()


@pytest.mark.parametrize(("per", "shape"), [("channel", (5, 1)), ("tensor", (1, 1))])
def test_fp8_scale_is_amax_over_448(per: str, shape: tuple[int, int]) -> None:
    weight = random(8, 5, 16)
    fmt = TensorFormat.model_validate({"dtype": "fp8_e4m3", "per": per})
    scale, zero = widest.find(weight, fmt, None, widest.Options())
    expected = weight.abs().amax(1, keepdim=True) / 448 if per == "channel" else weight.abs().max().view(1, 1) / 448
    assert zero is None and scale.shape == shape and torch.equal(scale, expected)
    assert (stored(weight, fmt, (scale, None)) - weight).abs().max() <= weight.abs().max() / 16


def test_input_statistics_do_not_depend_on_the_batches() -> None:
    x, weights = random(9, 50, 12), random(10, 50).abs()
    whole, parts = (InputStats({"amax", "second_moment", "kl_hessian"}, 12) for _ in range(2))
    whole.update(x.view(5, 10, 12), weights.view(5, 10))
    for piece, w in zip(x.split(7), weights.split(7), strict=True):
        parts.update(piece, w)
    assert whole.num_tokens == parts.num_tokens == 50
    torch.testing.assert_close(whole.amax, x.abs().amax(0))
    torch.testing.assert_close(whole.second_moment, parts.second_moment)
    torch.testing.assert_close(parts.second_moment, x.double().square().mean(0).float())
    torch.testing.assert_close(parts.kl_hessian, ((x * weights[:, None]).T @ x) / 50)
    assert InputStats(set(), 12).second_moment is None
