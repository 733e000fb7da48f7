"""Histograms against numpy's, in one process and in two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.histogram import BINS, FINITE, Histogram, magnitudes
from calibrate.inputs import InputStats

REPOSITORY = Path(__file__).resolve().parent.parent


def values(seed: int, size: int) -> torch.Tensor:
    """Float32 of very different magnitude and either sign, none midway between two of bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator) * torch.exp(8 * torch.randn(size, generator=generator))
    return (x.view(torch.int32) | 1).view(torch.float32)


def counted(x: torch.Tensor, **how: object) -> Histogram:
    histogram = Histogram()
    for part in x.split(how.get("parts", len(x))):  # type: ignore[arg-type]
        histogram.update(part)
    return histogram


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 3000), st.integers(1, 700))
def test_counts_are_those_of_numpy_however_the_batches_are_cut(seed: int, size: int, part: int) -> None:
    x = values(seed, size)
    points = magnitudes(torch.arange(FINITE)).numpy()
    edges = np.concatenate([[0], (points[1:] + points[:-1]) / 2, [points[-1]]])
    expected, _ = np.histogram(x.abs().double().numpy(), edges)
    histogram = counted(x, parts=part)
    assert np.array_equal(histogram.counts[:FINITE].numpy(), expected)
    assert histogram.num_samples == size and histogram.counts[FINITE:].sum() == 0
    assert histogram.amax == x.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 50, 2**18 + 1])
def test_bfloat16_values_are_counted_exactly_in_any_dtype(dtype: torch.dtype, size: int) -> None:
    x = (torch.randn(size, generator=torch.Generator().manual_seed(1)) * 3).bfloat16()
    x[x.abs() < 2**-6] = 0  # float16 holds the rest exactly
    expected, counts = np.unique(x.double().abs().numpy(), return_counts=True)
    seen, often = counted(x.to(dtype)).seen()
    assert np.array_equal(seen.numpy(), expected) and np.array_equal(often.numpy(), counts)


def test_any_shape_and_layout_counts_alike() -> None:
    x = values(2, 240)
    flat, turned = counted(x), counted(x.view(2, 4, 6, 5).transpose(1, 3))
    assert torch.equal(flat.counts, turned.counts) and flat.amax == turned.amax


def test_no_magnitude_is_over_the_largest_value() -> None:
    x = torch.tensor([1.005, -0.5])  # rounds up to 1.0078
    assert counted(x).seen()[0].tolist() == [0.5, x[0].item()]


def test_nothing_and_what_is_not_finite_are_refused() -> None:
    empty = counted(torch.zeros(0))
    with pytest.raises(ValueError, match="no value was seen"):
        empty.seen()
    for bad in (torch.inf, -torch.inf, torch.nan):
        with pytest.raises(ValueError, match="1 of 3 values are not finite"):
            counted(torch.tensor([0.0, bad, 1.0])).seen()
    assert counted(torch.zeros(5)).seen()[0].tolist() == [0.0]


SCRIPT = """
import os, sys, torch, torch.distributed as dist
from calibrate.inputs import InputStats
from qat.ranks import leave
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
x = torch.load(sys.argv[1])
stats = InputStats({"histogram"}, 8)
for part in x[rank::2].split(7):
    stats.update(part)
stats.reduce()
torch.save((stats.num_tokens, stats.histogram.counts, stats.histogram.amax), f"{sys.argv[1]}.{rank}")
leave()
"""


def test_two_ranks_end_with_the_counts_of_one(tmp_path: Path) -> None:
    x = values(3, 8 * 101).view(101, 8)
    x[::2] *= 1000  # the ranks see different ranges
    path = tmp_path / "x.pt"
    torch.save(x, path)
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    command = [*ranks, sys.executable, "-c", SCRIPT, str(path)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    whole = InputStats({"histogram"}, 8)
    whole.update(x)
    assert whole.histogram is not None and whole.histogram.counts.shape == (BINS,)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        num_tokens, counts, amax = torch.load(f"{path}.{rank}")
        assert num_tokens == 101 and torch.equal(counts, whole.histogram.counts) and amax == whole.histogram.amax
