"""Bit packing against slow loops written from the formats' documentation, and the library's own packer."""

from __future__ import annotations

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from export import _pack
from qat.quant import pack_nibbles

SETTINGS = settings(max_examples=25, deadline=None)


@st.composite
def nibbles(draw: st.DrawFn) -> Tensor:
    """(N, C) uint8 0..15, N and C multiples of 8; half of them a view that is not contiguous."""
    rows, columns = draw(st.integers(1, 4)) * 8, draw(st.integers(1, 5)) * 8
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    values = torch.randint(0, 16, (columns, rows), generator=random, dtype=torch.uint8).T
    return values.contiguous() if draw(st.booleans()) else values


def nibble(words: Tensor, row: int, column: int, place: int) -> int:
    return (int(words[row, column]) >> (4 * place)) & 15


@SETTINGS
@given(nibbles())
def test_awq_order(codes: Tensor) -> None:
    packed = _pack.awq(codes)
    assert packed.dtype == torch.int32 and packed.shape == (codes.shape[1], codes.shape[0] // 8)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # AutoAWQ, awq/modules/linear/gemm.py
    for k in range(codes.shape[1]):
        for j in range(packed.shape[1]):
            for i in range(8):
                assert nibble(packed, k, j, i) == codes[8 * j + order[i], k]


@SETTINGS
@given(nibbles())
def test_gptq_codes(codes: Tensor) -> None:
    packed = _pack.gptq_codes(pack_nibbles(codes.contiguous()))
    assert packed.dtype == torch.int32 and packed.shape == (codes.shape[1] // 8, codes.shape[0])
    for n in range(codes.shape[0]):
        for k in range(codes.shape[1]):
            assert nibble(packed, k // 8, n, k % 8) == codes[n, k]


@SETTINGS
@given(nibbles())
def test_int8_codes_go_four_to_a_word(values: Tensor) -> None:
    codes = (values.int() * 17 - 128).to(torch.int8).contiguous()
    packed = _pack.compressed_codes(codes)
    assert torch.equal(packed, pack_to_int32(codes, 8))
    words = _pack.gptq_codes(codes)
    assert words.dtype == torch.int32 and words.shape == (codes.shape[1] // 4, codes.shape[0])
    for n in range(codes.shape[0]):
        for k in range(codes.shape[1]):
            assert (int(words[k // 4, n]) >> (8 * (k % 4))) & 255 == int(codes[n, k]) + 128


@SETTINGS
@given(nibbles())
def test_compressed_tensors_words_are_the_librarys(values: Tensor) -> None:
    signed = values.to(torch.int8) - 8
    assert torch.equal(_pack.compressed_codes(pack_nibbles(values.contiguous())), pack_to_int32(signed.contiguous(), 4))
    assert torch.equal(_pack.compressed_zeros(values), pack_to_int32(signed.contiguous(), 4, packed_dim=0))


def test_one_group_of_one_row() -> None:
    column = torch.arange(16, dtype=torch.uint8).view(16, 1)  # its transpose is contiguous with strides (1, 1)
    assert _pack.awq(column).shape == (1, 2)
    assert torch.equal(_pack.compressed_zeros(column), pack_to_int32(column.to(torch.int8) - 8, 4, packed_dim=0))
