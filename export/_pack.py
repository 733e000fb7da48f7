"""Eight int4 codes in a 32-bit word, in the orders that the checkpoint formats define. Moves bits, computes nothing.

Bits 4 i .. 4 i + 3 of a word are its nibble i. With W (N outputs, K inputs), codes and zero points 0..15:

    AWQ     qweight [K, N / 8]      nibble i of word j is output 8 j + AWQ_ORDER[i]      AutoAWQ, WQLinear_GEMM
            qzeros  [K / g, N / 8]  the same order
    GPTQ    qweight [K / 8, N]      nibble i of word j is input 8 j + i                  AutoGPTQ, QuantLinear
            qzeros  [K / g, N / 8]  nibble i of word j is output 8 j + i, zero point less 1 (version 1)
    compressed-tensors
            weight_packed     [N, K / 8]      nibble i of word j is input 8 j + i        pack_to_int32(codes - 8, 4)
            weight_zero_point [N / 8, K / g]  nibble i of word j is output 8 j + i       pack_to_int32(zero - 8, 4, 0)

The library's pack_to_int32 gives the same words twenty times slower (0.65 s for 4096 x 4096 on two cores, 0.03 s here);
tests/test_pack.py holds the two against each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(nibbles: Tensor) -> Tensor:
    """(R, C) uint8 0..15 -> (R, C / 8) int32: nibble i of word j is column 8 j + i. C is a multiple of 8."""
    flat = nibbles.flatten()  # (1, C) transposed from (C, 1) counts as contiguous, with strides that `view` refuses
    return (flat[0::2] | flat[1::2] << 4).view(torch.int32).view(len(nibbles), -1)


def awq(values: Tensor) -> Tensor:
    """Codes (N, K) or zero points (N, K / g), uint8 -> int32 (K or K / g, N / 8)."""
    columns = values.T.unflatten(1, (-1, 8))[..., AWQ_ORDER]
    return words(columns.flatten(1))


def gptq_codes(pairs: Tensor) -> Tensor:
    """Codes as the artifact holds them, two per byte (N, K / 2) uint8 -> int32 (K / 8, N)."""
    return compressed_codes(pairs).T.contiguous()


def gptq_zeros(zero: Tensor) -> Tensor:
    """Zero points (N, K / g) uint8, 1..15 -> int32 (K / g, N / 8), version 1: one less is stored, 8 as 0x77777777."""
    return words(zero.T - 1)


def compressed_codes(pairs: Tensor) -> Tensor:
    """Codes as the artifact holds them, two per byte (N, K / 2) uint8 -> int32 (N, K / 8): the same bytes."""
    return pairs.view(torch.int32)


def compressed_zeros(zero: Tensor) -> Tensor:
    """Zero points (N, K / g) uint8 -> int32 (N / 8, K / g)."""
    return words(zero.T).T.contiguous()
