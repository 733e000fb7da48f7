"""A frozen weight kept as its codes, and dequantized anew wherever it is used: 4 bits a weight instead of 16."""

from __future__ import annotations

import torch
from torch import Tensor

from qat.quant import SYMMETRIC_ZERO, Quantized, dequantize, pack_nibbles, unpack_nibbles
from qat.scheme import TensorFormat


class PackedWeight:
    """Codes and zero points of a weight (N, K); its scale may change.

    codes: two int4 codes a byte, (N, K / 2) as of `pack_nibbles`, where K is even; else those of `Quantized`.
    """

    def __init__(self, q: Quantized, fmt: TensorFormat) -> None:
        self.fmt, self.shape, self.zero = fmt, q.codes.shape, q.zero
        self.codes = pack_nibbles(q.codes) if fmt.dtype == "int4" and self.shape[1] % 2 == 0 else q.codes

    @torch.no_grad()
    def dequantize(self, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight (N, K), the same numbers as `quant.dequantize` gives; what lies between takes a byte a weight."""
        codes = self.codes if self.codes.shape == self.shape else unpack_nibbles(self.codes)
        if not self.fmt.is_int:
            return dequantize(Quantized(codes, scale), self.fmt).to(dtype)
        signed = codes.view(torch.int8).view(*scale.shape, -1)
        if self.fmt.dtype == "int4":
            signed = signed - (SYMMETRIC_ZERO if self.zero is None else self.zero.view(torch.int8)[..., None])
        weight = torch.empty(self.shape, dtype=dtype, device=codes.device)
        torch.mul(signed, scale[..., None], out=weight.view(signed.shape))
        return weight
