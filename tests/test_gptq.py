"""GPTQ against the elimination that defines it, one row and one column at a time in float64, and its properties."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from calibrate.inputs import InputStats
from calibrate.range import _refit, least_squares
from calibrate.range import max as widest
from calibrate.round import gptq, nearest
from qat.quant import MIN_SCALE, Quantized, dequantize, quantize, scale_to_grid, signed_codes
from qat.scheme import TensorFormat

SYMMETRIC = TensorFormat(group_size=8)
ASYMMETRIC = TensorFormat(group_size=8, symmetric=False)
INT8 = TensorFormat(dtype="int8", group_size=8)
FORMATS = [SYMMETRIC, ASYMMETRIC, TensorFormat(), TensorFormat(group_size=40, symmetric=False), INT8]
seeds = st.integers(0, 2**31)


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def watched(x: Tensor) -> InputStats:
    stats = InputStats(gptq.NEEDS, x.shape[1])
    stats.update(x)
    return stats


def correlated(seed: int, width: int, tokens: int = 256) -> Tensor:
    """Inputs (tokens, K) of few common causes, with channels of different size."""
    return (
        random(seed, tokens, width // 4) @ random(seed + 1, width // 4, width) + random(seed + 2, tokens, width)
    ) * (random(seed + 3, width).exp())


def solve(weight: Tensor, x: Tensor, fmt: TensorFormat, **options: object) -> Quantized:
    scale, zero = widest.find(weight, fmt, None, widest.Options())
    return gptq.codes(weight, scale, zero, fmt, watched(x), gptq.Options.model_validate(options))


def error(weight: Tensor, q: Quantized, fmt: TensorFormat, hessian: Tensor) -> Tensor:
    lost = (dequantize(q, fmt) - weight).double()
    return ((lost @ hessian.double()) * lost).sum(1)


def eliminate(
    weight: Tensor, q: Quantized, fmt: TensorFormat, hessian: Tensor, damping: float, order: Tensor
) -> Tensor:
    """Codes by optimal brain quantization in a fixed order (Frantar et al. 2022, equations 2 and 3), at q's scales."""
    hessian = hessian.double()
    hessian = hessian + damping * hessian.diagonal().mean() * torch.eye(len(hessian))
    size = weight.shape[1] // q.scale.shape[1]
    out = torch.empty_like(q.codes)
    for n in range(len(weight)):
        row, inverse = weight[n].double().clone(), torch.linalg.inv(hessian)
        for k in order.tolist():
            scale, zero = q.scale[n : n + 1, k // size, None], None
            if q.zero is not None:
                zero = q.zero[n : n + 1, k // size, None]
            code = quantize(row[k].float().view(1, 1), scale, zero, fmt)
            out[n, k] = code
            lost = row[k] - dequantize(Quantized(code, scale, zero), fmt).double().item()
            row -= lost / inverse[k, k] * inverse[k]
            inverse -= torch.outer(inverse[:, k], inverse[k]) / inverse[k, k]
            # eliminated for good: rounding noise must not bring it back
            inverse[k], inverse[:, k], inverse[k, k] = 0, 0, 1
    return out


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("act_order", [True, False])
def test_equals_elimination_at_given_scales(fmt: TensorFormat, act_order: bool) -> None:
    weight, x = random(1, 6, 80), correlated(2, 80)
    q = solve(weight, x, fmt, act_order=act_order, refit=False, damping=0.01)
    hessian = watched(x).hessian
    assert hessian is not None
    order = hessian.diagonal().argsort(descending=True) if act_order else torch.arange(80)
    assert torch.equal(q.codes, eliminate(weight, q, fmt, hessian, 0.01, order))
    scale, zero = widest.find(weight, fmt, None, widest.Options())
    assert torch.equal(q.scale, scale)
    assert (zero is None and q.zero is None) or torch.equal(q.zero, zero)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_refitted_codes_were_chosen_for_the_scale_that_is_stored(fmt: TensorFormat) -> None:
    weight, x = random(3, 6, 80), correlated(4, 80)
    q = solve(weight, x, fmt, damping=0.01, refit=True)
    hessian = watched(x).hessian
    assert hessian is not None
    diagonal = hessian.diagonal()
    size = fmt.group_of(80)
    groups = sorted(range(80 // size), key=lambda g: -diagonal[g * size : (g + 1) * size].sum().item())
    order = [k for g in groups for k in sorted(range(g * size, (g + 1) * size), key=lambda k: -diagonal[k].item())]
    assert torch.equal(q.codes, eliminate(weight, q, fmt, hessian, 0.01, torch.tensor(order)))
    assert torch.equal(q.scale, scale_to_grid(q.scale)) and q.scale.min() >= MIN_SCALE


@given(seeds)
@settings(max_examples=25, deadline=None)
def test_never_worse_than_nearest(seed: int) -> None:
    """Errors uniform in a step: D_k s^2 / 12 a column here, H_kk s^2 / 12 there, and D_k <= H_kk. Summed over enough
    columns and rows, and with inputs as correlated as these, chance has no say."""
    weight, x = random(seed, 16, 64), correlated(seed + 5, 64)
    hessian = watched(x).hessian
    assert hessian is not None
    scale, zero = widest.find(weight, SYMMETRIC, None, widest.Options())
    plain = nearest.codes(weight, scale, zero, SYMMETRIC, None, nearest.Options())
    fixed = solve(weight, x, SYMMETRIC, refit=False)
    assert error(weight, fixed, SYMMETRIC, hessian).sum() < error(weight, plain, SYMMETRIC, hessian).sum()
    refitted = solve(weight, x, SYMMETRIC, refit=True)
    assert error(weight, refitted, SYMMETRIC, hessian).sum() < error(weight, plain, SYMMETRIC, hessian).sum()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("act_order", [True, False])
def test_uncorrelated_inputs_give_nearest_codes(fmt: TensorFormat, act_order: bool) -> None:
    weight = random(7, 6, 80)
    scale, zero = widest.find(weight, fmt, None, widest.Options())
    stats = watched(torch.eye(80) * random(8, 80).exp())
    q = gptq.codes(weight, scale, zero, fmt, stats, gptq.Options(act_order=act_order, refit=False))
    assert torch.equal(q.codes, quantize(weight, scale, zero, fmt))


@pytest.mark.parametrize("refit", [True, False])
def test_order_of_uncorrelated_inputs_in_a_group_does_not_matter(refit: bool) -> None:
    weight, sizes = random(9, 6, 80), random(10, 80).exp()
    order = torch.cat([g * 8 + torch.randperm(8, generator=torch.Generator().manual_seed(g)) for g in range(10)])
    one = solve(weight, torch.diag(sizes), SYMMETRIC, refit=refit)
    other = solve(weight[:, order].contiguous(), torch.diag(sizes[order]), SYMMETRIC, refit=refit)
    assert torch.equal(one.codes[:, order], other.codes) and torch.equal(one.scale, other.scale)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_dead_inputs_are_rounded_to_nearest_and_disturb_nothing(fmt: TensorFormat) -> None:
    weight, x = random(11, 6, 80), correlated(12, 80)
    dead = torch.arange(3, 80, 8)
    x[:, dead] = 0
    scale, zero = widest.find(weight, fmt, None, widest.Options())
    other = weight.clone()
    other[:, dead] *= 0.5
    options = gptq.Options(refit=False)
    q, r = (gptq.codes(w, scale, zero, fmt, watched(x), options) for w in (weight, other))
    assert torch.equal(q.codes[:, dead], quantize(weight, scale, zero, fmt)[:, dead])
    alive = torch.ones(80, dtype=torch.bool)
    alive[dead] = False
    assert torch.equal(q.codes[:, alive], r.codes[:, alive])
    assert dequantize(solve(weight, x, fmt, refit=True), fmt).isfinite().all()


def test_inputs_that_are_all_zero_give_nearest_codes() -> None:
    weight = random(13, 6, 80)
    q = solve(weight, torch.zeros(4, 80), SYMMETRIC, refit=False)
    assert torch.equal(q.codes, quantize(weight, q.scale, None, SYMMETRIC))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("refit", [True, False])
def test_a_row_of_zeros_stays_zero(fmt: TensorFormat, refit: bool) -> None:
    weight = random(14, 6, 80)
    weight[2] = 0
    weight[4, :8] = 0
    q = solve(weight, correlated(15, 80), fmt, refit=refit)
    back = dequantize(q, fmt)
    assert back.isfinite().all() and q.scale.min() >= MIN_SCALE
    assert torch.equal(back[2], torch.zeros(80))


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("refit", [True, False])
def test_weights_on_a_grid_come_back(fmt: TensorFormat, refit: bool) -> None:
    weight = random(16, 6, 80)
    scale, zero = widest.find(weight, fmt, None, widest.Options())
    first = nearest.codes(weight, scale, zero, fmt, None, nearest.Options())
    again = gptq.codes(dequantize(first, fmt), scale, zero, fmt, watched(correlated(17, 80)), gptq.Options(refit=refit))
    for a, b in zip(first, again, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_rows_do_not_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = random(18, 9, 80), correlated(19, 80)
    whole = solve(weight, x, SYMMETRIC, refit=True)
    monkeypatch.setattr(gptq, "ROWS", 2)
    monkeypatch.setattr(_refit, "CHUNK", 8)
    parts = solve(weight, x, SYMMETRIC, refit=True)
    assert torch.equal(whole.codes, parts.codes) and torch.equal(whole.scale, parts.scale)


def test_damping_grows_until_there_is_a_factor_and_is_reported() -> None:
    weight, stats = random(20, 6, 80), watched(random(21, 1, 80))
    scale, _ = widest.find(weight, SYMMETRIC, None, widest.Options())
    q = gptq.codes(weight, scale, None, SYMMETRIC, stats, gptq.Options(damping=0))
    assert 0 < stats.notes["damping"] <= 1
    assert dequantize(q, SYMMETRIC).isfinite().all()
    stats = watched(correlated(22, 80))
    gptq.codes(weight, scale, None, SYMMETRIC, stats, gptq.Options(damping=0.02))
    assert stats.notes["damping"] == 0.02


def test_what_cannot_be_solved_is_an_error() -> None:
    weight = random(23, 6, 80)
    scale, _ = widest.find(weight, SYMMETRIC, None, widest.Options())
    x = correlated(24, 80)
    broken = x.clone()
    broken[3, 5] = torch.nan
    stats = watched(x)
    stats._gram = torch.full((80, 80), 10.0).fill_diagonal_(1)  # not positive, whatever the damping
    cases = [(InputStats(gptq.NEEDS, 80), "no token"), (watched(broken), "not finite"), (stats, "no Cholesky factor")]
    for inputs, text in cases:
        with pytest.raises(ValueError, match=text):
            gptq.codes(weight, scale, None, SYMMETRIC, inputs, gptq.Options())


@pytest.mark.parametrize("fmt", [SYMMETRIC, ASYMMETRIC], ids=str)
def test_refit_is_at_least_as_good_as_every_candidate(fmt: TensorFormat) -> None:
    target, importance = random(25, 8, 30), random(26, 8).exp()
    scale, zero = widest.find(target.T.contiguous(), fmt, None, widest.Options())
    start: float | Tensor = 8.0 if zero is None else zero[:, 0].float()
    found, found_zero = _refit.refit(target, importance, scale[:, 0], start, fmt)
    assert torch.equal(found, scale_to_grid(found))

    def lost(row: int, s: Tensor, z: Tensor | None) -> float:
        w = target[:, row][None]
        q = Quantized(quantize(w, s.view(1, 1), z, fmt), s.view(1, 1), z)
        return ((dequantize(q, fmt) - w).double().square() @ importance.double()).item()

    clipped = 0
    for row in range(30):
        z = None if isinstance(found_zero, float) else found_zero[row].to(torch.uint8).view(1, 1)
        ours = lost(row, found[row], z)
        for ratio in _refit.RATIOS:
            s, z = widest.find(target[:, row][None] * ratio, fmt, None, widest.Options())
            assert ours <= lost(row, s, z) * (1 + 1e-5)
            clipped += ratio < 1 and ours < lost(row, s, z)
    assert clipped


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_least_squares_range_cannot_be_improved_by_another_scale_for_its_codes(fmt: TensorFormat) -> None:
    weight, x = random(27, 6, 80), correlated(28, 80)
    stats = InputStats(least_squares.NEEDS, 80)
    stats.update(x)
    assert stats.second_moment is not None
    scale, zero = least_squares.find(weight, fmt, stats, least_squares.Options())
    q = Quantized(quantize(weight, scale, zero, fmt), scale, zero)
    plain_scale, plain_zero = widest.find(weight, fmt, None, widest.Options())
    plain = Quantized(quantize(weight, plain_scale, plain_zero, fmt), plain_scale, plain_zero)
    importance = torch.diag(stats.second_moment)
    ours, theirs = error(weight, q, fmt, importance), error(weight, plain, fmt, importance)
    assert (ours <= theirs * (1 + 1e-5)).all() and ours.sum() < 0.95 * theirs.sum()
    # the exact optimum for the codes lies within a few steps of the stored grid, 8 bits, and of another round of codes
    moments = stats.second_moment.view(-1, fmt.group_of(80)).double()
    code = signed_codes(q).view(*scale.shape, -1).double()
    target = weight.view(code.shape).double()
    best = (moments * code * target).sum(-1) / (moments * code.square()).sum(-1)
    assert (scale / best - 1).abs().median() < 2**-7
