"""The numbers: codes, scales, zero points. Tensors in, tensors out; one rounding function, used by every stage.

A weight W (rows = output channels N, columns = inputs K) in groups of g inputs is stored as

    int4:  W[n, k] = (codes[n, k] - zero[n, k // g]) * scale[n, k // g]    codes, zero in 0..15; zero = 8 when symmetric
    int8:  W[n, k] = codes[n, k] * scale[n, k // g]                         codes are signed, -128..127
    fp8:   W[n, k] = codes[n, k] * scale[n or 0, 0]                         codes are float8 E4M3, |code| <= 448
           in blocks: scale[n // 128, k // 128], the last block of a row or column may be smaller

INT4 and INT8 scales and every bias lie on the grid of `on_grid`, scales at least 2^-14: such a value is exact in
bfloat16 and in float16, so the same bytes serve both. An int4 code times a scale then has at most 11 significant bits
when symmetric: the dequantized weight is exact in float16. Scales of fp8 are any float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qat.scheme import BLOCK, TensorFormat

MIN_SCALE = 2.0**-14  # the smallest normal float16
FP8_MAX = 448.0  # largest finite float8 E4M3 (OCP 8-bit floating point specification, table 1)
SYMMETRIC_ZERO = 8
INT8_INPUT = 127.0  # engines scale int8 activations to -127..127 (vLLM, dynamic_scaled_int8_quant)


class Quantized(NamedTuple):
    """One linear's weight.

    codes: (N, K) uint8 0..15 for int4, int8 -128..127 for int8, float8_e4m3fn for fp8. scale: float32 of
    `TensorFormat.scale_shape`: (N, K / g), (N, 1) per channel, (1, 1) per tensor, (ceil N / 128, ceil K / 128) in
    blocks. zero: (N, K / g) uint8, or None for symmetric formats.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None


def on_grid(x: Tensor) -> Tensor:
    """The nearest float32 values on the grid that bfloat16 and float16 share; infinite past the float16 range.

    Does not look at the values, for which a GPU would have to wait.
    """
    return x.bfloat16().half().float()


def to_grid(x: Tensor) -> Tensor:
    """`on_grid`. Raises ValueError past the float16 range."""
    y = on_grid(x)
    if not torch.isfinite(y).all():
        worst = x.abs().nan_to_num(nan=torch.inf).max().item()
        raise ValueError(
            f"value {worst:g} has no finite float16 form (at most 65504): the engines store it in 16 bits; put the "
            "layer into scheme.skip"
        )
    return y


def scale_to_grid(scale: Tensor) -> Tensor:
    """Round positive scales to the shared 16-bit grid, none under 2^-14 (a subnormal or zero scale)."""
    return to_grid(scale.float().clamp_min(MIN_SCALE))


def grouped(weight: Tensor, group_size: int) -> Tensor:
    """View (N, K) as (N, K / group_size, group_size). Raises ValueError when group_size does not divide K."""
    rows, columns = weight.shape
    if columns % group_size:
        raise ValueError(f"group size {group_size} does not divide {columns} inputs")
    return weight.view(rows, columns // group_size, group_size)


def max_scale(amax: Tensor, fmt: TensorFormat) -> Tensor:
    """The scale that just holds values of magnitude `amax`, on the format's own grid, any shape.

    int4 symmetric uses amax / 7.5: codes run from -8 to 7, and half a step of clipping on the positive side costs less
    than an unused code on the negative side. int8 likewise uses amax / 127.5.
    """
    if fmt.is_int:
        return scale_to_grid(amax / (2 ** (fmt.bits - 1) - 0.5))
    return (amax.float() / FP8_MAX).clamp_min(MIN_SCALE**2)


def block_amax(weight: Tensor) -> Tensor:
    """The largest magnitude in each 128 x 128 block of a weight (N, K): (ceil N / 128, ceil K / 128)."""
    rows, columns = weight.shape
    padded = F.pad(weight.abs(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    return padded.view(-(-rows // BLOCK), BLOCK, -1, BLOCK).amax((1, 3))


def spread(scale: Tensor, fmt: TensorFormat, rows: int, columns: int) -> Tensor:
    """An fp8 scale in a shape that broadcasts against (rows, columns); that of blocks is repeated."""
    if fmt.per != "block":
        return scale
    return scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]


def minmax_scale(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Asymmetric int4 scale and zero point (uint8 0..15) that hold the range low..high, which is first widened to 0."""
    low, high = low.clamp_max(0), high.clamp_min(0)
    scale = scale_to_grid((high - low) / 15)
    zero = (-low / scale).round().clamp(0, 15).to(torch.uint8)
    return scale, zero


def quantize(weight: Tensor, scale: Tensor, zero: Tensor | None, fmt: TensorFormat) -> Tensor:
    """Nearest codes (N, K) of a float32 weight (N, K), ties to even; inverts `dequantize` exactly.

    Example: `quantize(dequantize(q, fmt), q.scale, q.zero, fmt)` equals `q.codes`, for every format.
    """
    if fmt.dtype == "fp8_e4m3":
        return _to_fp8(weight / spread(scale, fmt, *weight.shape))
    steps = (grouped(weight, weight.shape[1] // scale.shape[1]) / scale[..., None]).round()
    if fmt.dtype == "int8":
        return steps.clamp(-128, 127).to(torch.int8).view(weight.shape)
    offset = SYMMETRIC_ZERO if zero is None else zero[..., None].float()
    return (steps + offset).clamp(0, 15).to(torch.uint8).view(weight.shape)


def _to_fp8(x: Tensor) -> Tensor:
    """The nearest float8 E4M3, saturating."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def dequantize(q: Quantized, fmt: TensorFormat) -> Tensor:
    """The float32 weight (N, K) that the codes stand for."""
    if fmt.dtype == "fp8_e4m3":
        return q.codes.float() * spread(q.scale, fmt, *q.codes.shape)
    return (signed_codes(q).view(*q.scale.shape, -1) * q.scale[..., None]).view(q.codes.shape)


def signed_codes(q: Quantized) -> Tensor:
    """int4 codes minus their zero point, or int8 codes: float32 (N, K), what multiplies the scale."""
    if q.codes.dtype == torch.int8:
        return q.codes.float()
    groups = grouped(q.codes, q.codes.shape[1] // q.scale.shape[1]).float()
    zero = SYMMETRIC_ZERO if q.zero is None else q.zero[..., None].float()
    return (groups - zero).view(q.codes.shape)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Two int4 codes (N, K) uint8 per byte: (N, K / 2), the even input in the low half. K must be even."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """The inverse of `pack_nibbles`."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).view(packed.shape[0], -1)


def fake_quant_input(x: Tensor, fmt: TensorFormat, static_scale: Tensor | None = None) -> Tensor:
    """Activations (..., K) as an engine that stores them as `fmt` sees them, in their own dtype.

    static_scale: float32, one value, for `per: tensor`; token and group scales are found here, from amax / 127 for
    int8 and amax / 448 for fp8. A last group of fewer than `group_size` inputs has a scale of its own.
    """
    size, columns = fmt.group_of(x.shape[-1]), x.shape[-1]
    groups = F.pad(x.float(), (0, -columns % size)).unflatten(-1, (-1, size))
    largest = INT8_INPUT if fmt.is_int else FP8_MAX
    scale = static_scale
    if scale is None:
        scale = (groups.abs().amax(-1, keepdim=True) / largest).clamp_min(1e-12)
    steps = groups / scale
    codes = steps.round().clamp(-128, 127) if fmt.is_int else _to_fp8(steps).float()
    return (codes * scale).flatten(-2)[..., :columns].to(x.dtype)


def fake_quant_cache(x: Tensor, scale: Tensor) -> Tensor:
    """Keys or values (...) as they come back from an fp8 KV cache with the static `scale` (1,), in their own dtype."""
    return (_to_fp8(x.float() / scale).float() * scale).to(x.dtype)
