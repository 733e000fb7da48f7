"""Learned rounding on small random blocks: never worse than its start, and the whole model closer to its parent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from calibrate.range import max as widest
from calibrate.round import learned, nearest
from calibrate.task import BlockTask
from qat import plugins
from qat.artifact import Artifact
from qat.plugins import ROOT
from qat.quant import Quantized, dequantize, quantize, to_grid
from qat.scheme import TensorFormat
from tests.test_observe import INT4, WINDOWS, make, run

FORMATS = [
    TensorFormat(group_size=8),
    TensorFormat(group_size=8, symmetric=False),
    TensorFormat(),
    TensorFormat(symmetric=False),
]
formats = pytest.mark.parametrize("fmt", FORMATS, ids=str)
WIDTH, INNER, LENGTH = 16, 24, 5
QUICK = learned.Options(steps=30, batch=3)


class Block(nn.Module):
    """A gated layer with a residual, and a linear that no token reaches."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in (
            ("gate", (INNER, WIDTH)),
            ("up", (INNER, WIDTH)),
            ("down", (WIDTH, INNER)),
            ("idle", (8, WIDTH)),
        ):
            linear = nn.Linear(shape[1], shape[0], bias=False, dtype=dtype)
            linear.weight = nn.Parameter(torch.randn(shape, generator=generator).to(dtype) * 0.3, requires_grad=False)
            setattr(self, name, linear)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


def task_of(
    fmt: TensorFormat,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    change: Callable[[dict[str, Tensor]], None] = lambda weights: None,
    inputs: Tensor | None = None,
) -> BlockTask:
    """A block, 12 windows in batches of 5, 5 and 2, and targets from other inputs than the block gets."""
    block = Block(seed, dtype)
    linears = {name: module for name, module in block.named_children() if isinstance(module, nn.Linear)}
    weights = {name: linear.weight.float().clone() for name, linear in linears.items()}
    change(weights)
    for name, linear in linears.items():
        linear.weight.copy_(weights[name])
    generator = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(12, LENGTH, WIDTH, generator=generator).to(dtype) if inputs is None else inputs
    with torch.no_grad():
        targets = block(x)
    x = x + 0.02 * torch.randn(x.shape, generator=generator).to(dtype) * (x != 0)
    ranges = {name: widest.find(weight, fmt, None, widest.Options()) for name, weight in weights.items()}
    given = dict.fromkeys(linears, fmt)
    return BlockTask(linears, weights, given, ranges, {}, block.forward, x.split(5), targets.split(5), seed=3)


def relative_error(task: BlockTask, found: dict[str, Quantized]) -> float:
    """Mean over tokens of |output - target|^2 / |target|^2, with the weights stored."""
    for name, q in found.items():
        task.linears[name].weight = nn.Parameter(dequantize(q, task.formats[name]).to(task.inputs[0].dtype), False)
    with torch.no_grad():
        outputs = torch.cat([task.forward(x) for x in task.inputs]).double()
    targets = torch.cat(list(task.targets)).double()
    return ((outputs - targets).square().sum(-1) / targets.square().sum(-1)).mean().item()


def rounded(task: BlockTask) -> dict[str, Quantized]:
    options = nearest.Options()
    return {
        name: nearest.codes(weight, *task.ranges[name], task.formats[name], None, options)
        for name, weight in task.weights.items()
    }


@formats
def test_the_block_comes_closer_to_its_parent(fmt: TensorFormat) -> None:
    task = task_of(fmt)
    found = learned.block(task, learned.Options(steps=100, batch=4))
    assert relative_error(task, found) < 0.75 * relative_error(task, rounded(task))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 12), st.floats(0.01, 50), st.sampled_from(FORMATS))
def test_never_worse_than_the_start_at_any_rate(seed: int, steps: int, rate: float, fmt: TensorFormat) -> None:
    task = task_of(fmt, seed)
    found = learned.block(task, learned.Options(steps=steps, batch=2, rate=rate, scale_rate=rate))
    assert relative_error(task, found) <= relative_error(task, rounded(task)) * (1 + 1e-5)


@formats
def test_what_is_stored_is_on_the_grid_and_in_range(fmt: TensorFormat) -> None:
    task = task_of(fmt)
    found = learned.block(task, QUICK)
    assert list(found) == list(task.linears)
    for name, q in found.items():
        scale, zero = task.ranges[name]
        assert q.codes.dtype == torch.uint8 and q.codes.shape == task.weights[name].shape and q.codes.max() <= 15
        assert q.scale.shape == scale.shape and torch.equal(to_grid(q.scale), q.scale) and q.scale.min() >= 2.0**-14
        assert ((q.scale / scale - 1) <= 0.26).all() and (q.scale / scale >= 0.49).all()
        assert (q.zero is None) == (zero is None) and (q.zero is None or torch.equal(q.zero, zero))
        assert torch.equal(quantize(dequantize(q, fmt), q.scale, q.zero, fmt), q.codes)


@pytest.mark.parametrize("window", [0.5, 1.0])
def test_codes_stay_within_the_window_of_the_nearest(window: float) -> None:
    task = task_of(FORMATS[0])
    found = learned.block(task, learned.Options(steps=60, batch=4, rate=3, scale_rate=0, window=window))
    far = 0.0
    for name, q in found.items():
        exact = task.weights[name].view(*q.scale.shape, -1) / q.scale[..., None] + 8
        gap = (q.codes.view(exact.shape).float() - exact.clamp(-0.5, 15.5)).abs().max().item()
        far = max(far, gap)
        assert torch.equal(q.scale, task.ranges[name][0])
    assert 0.5 < far <= 0.5 + window + 1e-4


def test_the_same_seed_gives_the_same_bytes_and_leaves_the_global_generator_alone() -> None:
    one, other = task_of(FORMATS[0]), task_of(FORMATS[0])
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = learned.block(one, QUICK)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    second = learned.block(other, QUICK)
    for name in first:
        assert torch.equal(first[name].codes, second[name].codes) and torch.equal(first[name].scale, second[name].scale)


@formats
def test_a_linear_without_tokens_keeps_nearest_codes(fmt: TensorFormat) -> None:
    task = task_of(fmt)
    found = learned.block(task, QUICK)["idle"]
    start = rounded(task)["idle"]
    assert torch.equal(found.codes, start.codes) and torch.equal(found.scale, start.scale)


@formats
def test_a_dead_input_keeps_nearest_codes_and_zeros_stay_zero(fmt: TensorFormat) -> None:
    def change(weights: dict[str, Tensor]) -> None:
        weights["up"][3] = 0  # a row
        weights["gate"][2, :8] = 0  # a group

    x = torch.randn(12, LENGTH, WIDTH, generator=torch.Generator().manual_seed(7))
    x[..., 5] = 0
    task = task_of(fmt, change=change, inputs=x)
    found = learned.block(task, learned.Options(steps=40, batch=4, scale_rate=0))
    for name in ("gate", "up"):
        assert torch.equal(found[name].codes[:, 5], rounded(task)[name].codes[:, 5])
    assert not dequantize(found["up"], fmt)[3].any()
    if fmt.group_size == 8:
        assert not dequantize(found["gate"], fmt)[2, :8].any()
    assert all(torch.isfinite(dequantize(q, fmt)).all() for q in found.values())


def test_linears_with_formats_of_their_own_learn_together() -> None:
    task = task_of(FORMATS[0])
    mixed = dict(zip(task.formats, FORMATS, strict=True))
    ranges = {name: widest.find(w, mixed[name], None, widest.Options()) for name, w in task.weights.items()}
    task = BlockTask(**{**vars(task), "formats": mixed, "ranges": ranges})
    found = learned.block(task, learned.Options(steps=80, batch=4))
    assert all(found[name].scale.shape == ranges[name][0].shape for name in found)
    assert relative_error(task, found) < 0.8 * relative_error(task, rounded(task))


@pytest.mark.parametrize("fmt", [TensorFormat(dtype="int8"), TensorFormat(dtype="int8", group_size=8)], ids=str)
def test_int8_keeps_its_signed_codes(fmt: TensorFormat) -> None:
    task = task_of(fmt)
    found = learned.block(task, QUICK)
    assert relative_error(task, found) <= relative_error(task, rounded(task)) * (1 + 1e-5)
    for q in found.values():
        assert q.codes.dtype == torch.int8 and q.codes.min() < -64 and q.codes.max() > 64
        assert torch.equal(quantize(dequantize(q, fmt), q.scale, q.zero, fmt), q.codes)


def test_in_bfloat16_too() -> None:
    task = task_of(FORMATS[0], dtype=torch.bfloat16)
    found = learned.block(task, learned.Options(steps=100, batch=4))
    assert relative_error(task, found) < 0.75 * relative_error(task, rounded(task))


def test_a_token_far_larger_than_the_others_does_not_decide() -> None:
    """A sink token of 1,000 times the size in every window: the other tokens come out as close as without it."""
    x = torch.randn(12, LENGTH, WIDTH, generator=torch.Generator().manual_seed(7))
    x[:, 0] *= 1000
    task = task_of(FORMATS[0], inputs=x)
    start = rounded(task)
    found = learned.block(task, learned.Options(steps=100, batch=4))

    def others(q: dict[str, Quantized]) -> float:
        rest = BlockTask(
            **{**vars(task), "inputs": [x[:, 1:] for x in task.inputs], "targets": [t[:, 1:] for t in task.targets]}
        )
        return relative_error(rest, q)

    assert others(found) < 0.8 * others(start)


def test_options_are_read_without_torch_and_checked() -> None:
    read = plugins.options("calibrate.round", "learned")
    assert read().model_dump() == learned.Options().model_dump()
    with pytest.raises(ValidationError, match="checks 5 of 4 steps"):
        read(steps=4, checks=5)


def test_more_checks_never_keep_a_worse_block() -> None:
    found = {}
    for checks in (1, 20):
        task = task_of(FORMATS[0])
        q = learned.block(task, learned.Options(steps=20, batch=2, rate=8, checks=checks))
        found[checks] = relative_error(task, q)
    assert found[20] <= found[1] * (1 + 1e-5)


def test_a_non_finite_start_is_named() -> None:
    task = task_of(FORMATS[0])
    task.targets[0][0, 0, 0] = torch.inf
    with pytest.raises(ValueError, match=r"error against the parent is (nan|inf).*compute\.dtype"):
        learned.block(task, QUICK)


def test_the_whole_model_comes_closer_to_its_parent(tmp_path: Path) -> None:
    """By the runner, block after block; logits are those of Hugging Face's own forward pass."""
    parent = AutoModelForCausalLM.from_pretrained(make(tmp_path / "parent"))
    error = {}
    for name, method in {"nearest": "nearest", "learned": {"name": "learned", "steps": 60, "batch": 4}}.items():
        run(tmp_path / "parent", tmp_path / name, INT4, range="activation", round=method)
        artifact = Artifact(tmp_path / name)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "parent")
        for linear in artifact.formats:
            model.get_submodule(linear).weight.data = artifact.get(f"{linear}.weight").float()
        with torch.no_grad():
            error[name] = (model(WINDOWS).logits - parent(WINDOWS).logits).square().mean().item()
    assert error["learned"] < 0.8 * error["nearest"]


RANKS = """
import sys, torch
sys.path[:0] = [{root!r}]
from calibrate.round import learned
from qat.ranks import leave
from tests.test_learned import FORMATS, QUICK, task_of
torch.distributed.init_process_group("gloo")
found = learned.block(task_of(FORMATS[0]), QUICK)
torch.save({{name: tuple(q) for name, q in found.items()}}, sys.argv[1] + str(torch.distributed.get_rank()))
leave()
"""


@pytest.mark.slow
def test_two_ranks_share_the_work_and_agree(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(root=str(ROOT)))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    for _ in range(2):
        done = subprocess.run([*launch, str(tmp_path / "found")], capture_output=True, text=True, check=False)
        # seen twice in some fifty launches on busy cores, never where it could be looked at: gloo or torch aborts
        if "terminate called without an active exception" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (torch.load(tmp_path / f"found{rank}") for rank in range(2))
    one = learned.block(task_of(FORMATS[0]), QUICK)
    start = rounded(task_of(FORMATS[0]))
    for name, q in one.items():
        assert all(torch.equal(a, b) for a, b in zip(first[name][:2], second[name][:2], strict=True))
        # sums over tokens in another order move a weight that is near the middle of two codes
        assert (first[name][0] == q.codes).float().mean() > 0.97, name
    assert any(not torch.equal(one[name].codes, start[name].codes) for name in one)
