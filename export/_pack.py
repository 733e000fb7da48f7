"""Eight int4 or four int8 codes in a 32-bit word, in the orders that the formats define. Moves bits, computes nothing.

Bits 4 i .. 4 i + 3 of a word are its nibble i. With W (N outputs, K inputs), codes and zero points 0..15:

    AWQ     qweight [K, N / 8]      nibble i of word j is output 8 j + AWQ_ORDER[i]      AutoAWQ, WQLinear_GEMM
            qzeros  [K / g, N / 8]  the same order
    GPTQ    qweight [K / 8, N]      nibble i of word j is input 8 j + i                  AutoGPTQ, QuantLinear
            qzeros  [K / g, N / 8]  nibble i of word j is output 8 j + i, zero point less 1 (version 1)
    compressed-tensors
            weight_packed     [N, K / 8]      nibble i of word j is input 8 j + i        pack_to_int32(codes - 8, 4)
            weight_zero_point [N / 8, K / g]  nibble i of word j is output 8 j + i       pack_to_int32(zero - 8, 4, 0)

    ModelOpt uint8 [N / 2, K]: bits 0..3 of byte [j, k] are output 2 j, bits 4..7 output 2 j + 1, codes - 8 in two's
            complement

int8 codes -128..127 are stored as code + 128, byte i of a word in place of nibble i: four to a word, so that qweight is
[K / 4, N] and weight_packed [N, K / 4]; symmetric GPTQ zero points of 128, less 1, are 0x7f7f7f7f.

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


def gptq_codes(stored: Tensor) -> Tensor:
    """Codes as the artifact holds them, int4 (N, K / 2) or int8 (N, K) -> int32 (K / 8 or K / 4, N)."""
    return compressed_codes(stored).T.contiguous()


def compressed_codes(stored: Tensor) -> Tensor:
    """Codes as the artifact holds them, int4 two per byte uint8 (N, K / 2): the same bytes as int32 (N, K / 8); int8
    (N, K): int32 (N, K / 4), the top bit of each byte turned over, which adds 128."""
    return (stored if stored.dtype == torch.uint8 else stored.view(torch.uint8) ^ 0x80).view(torch.int32)


def compressed_zeros(zero: Tensor) -> Tensor:
    """Zero points (N, K / g) uint8 -> int32 (N / 8, K / g)."""
    return words(zero.T).T.contiguous()


def modelopt(codes: Tensor) -> Tensor:
    """Codes (N, K) uint8 0..15 -> uint8 (N / 2, K)."""
    signed = codes ^ 8  # less 8, in two's complement of 4 bits
    return signed[0::2] | signed[1::2] << 4
