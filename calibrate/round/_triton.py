"""The column loop of GPTQ on a GPU: each program rounds up to 128 columns of a few rows, in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qat.scheme import TensorFormat

ROWS = 32  # of a program
NEAREST = tl.constexpr(1.5 * 2**23)  # added and taken away it rounds to the nearest integer, ties to even


@triton.jit
def _columns(
    target, error, feedback, scale, zero, num_rows, stride,
    COUNT: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, HAS_ZERO: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    live = rows < num_rows
    where = columns[:, None].to(tl.int64) * stride + rows[None, :]
    inside = (columns[:, None] < COUNT) & live[None, :]
    t = tl.load(target + where, mask=inside, other=0.0)
    for step in range(COUNT):
        k = COUNT - 1 - step
        mine = tl.sum(tl.where(columns[:, None] == k, t, 0.0), 0)
        s = tl.load(scale + k * num_rows + rows, mask=live, other=1.0)
        z = tl.load(zero + k * num_rows + rows, mask=live, other=0.0) if HAS_ZERO else HALF
        code = tl.minimum(tl.maximum(tl.div_rn(mine, s), -z), 2 * HALF - 1 - z)
        code = (code + NEAREST) - NEAREST
        here = error + k * stride + rows
        lost = tl.load(here, mask=live, other=0.0) - code * s
        tl.store(here, lost, mask=live)
        share = tl.load(feedback + k + columns * COUNT, mask=columns < k, other=0.0)
        t = tl.where(columns[:, None] == k, code[None, :], t + share[:, None] * lost[None, :])
    tl.store(target + where, t, mask=inside)


def columns(
    target: Tensor, error: Tensor, feedback: Tensor, scale: Tensor, zero: Tensor | None, fmt: TensorFormat
) -> None:
    """Round the columns of target (k, n) in place, k at most 128; `error` too becomes what is lost.

    All float32 on one GPU, the last column first. feedback: A^T (k, k), contiguous. scale: (k, n). zero: (k, n), or
    None for a symmetric format.
    """
    count, rows = target.shape
    assert target.stride() == error.stride() and target.stride(1) == 1
    with torch.cuda.device(target.device):
        _columns[(triton.cdiv(rows, ROWS),)](
            target, error, feedback, scale, scale if zero is None else zero, rows, target.stride(0),
            COUNT=count, COLUMNS=triton.next_power_of_2(count), ROWS=ROWS, HALF=float(2 ** (fmt.bits - 1)),
            HAS_ZERO=zero is not None,
        )  # fmt: skip
