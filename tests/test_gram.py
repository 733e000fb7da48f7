"""x^T x against the plain product in float64."""

from __future__ import annotations

import pytest
import torch

from calibrate.gram import add_gram, mirrored
from calibrate.inputs import InputStats

WIDTHS = [1, 40, 192, 200, 1000]  # one stripe and several, even and not


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_gram_is_the_sum_of_products(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(width)
    parts = [torch.randn(tokens, width, generator=generator).to(dtype) for tokens in (0, 3, 2500)]
    total = torch.zeros(width, width)
    for part in parts:
        add_gram(total, part)
    x = torch.cat(parts).double()
    size = x.square().sum(0).sqrt()  # an entry is at most the product of two of these
    # a bfloat16 product is rounded once per part, to 8 bits
    tolerance = 2**-8 if dtype == torch.bfloat16 else 1e-5
    assert ((mirrored(total) - x.T @ x).abs() <= tolerance * torch.outer(size, size)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hessian_is_symmetric_to_the_last_bit(dtype: torch.dtype) -> None:
    stats = InputStats({"hessian"}, 300)
    stats.update(torch.randn(2, 50, 300, generator=torch.Generator().manual_seed(0)).to(dtype))
    stats.rescale(torch.rand(300, generator=torch.Generator().manual_seed(1)) + 0.5)
    assert stats.hessian is not None
    assert torch.equal(stats.hessian, stats.hessian.T)
