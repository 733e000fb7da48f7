"""Products of inputs: most of the arithmetic of calibration, in one place.

x^T x is symmetric: a few stripes of rows, each up to its end of the diagonal, are 5/8 to 3/4 of the work.

bfloat16 inputs are multiplied as such. A CPU's product comes rounded to bfloat16, so the tokens are split and the parts
added up in float32: the error is that of one rounding, and falls with the square root of their number.
A GPU gives the float32 sums themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

STRIPES = 4
NARROW = 192  # inputs of a stripe, at least
TOKENS = 1024  # of one bfloat16 product on a CPU


@torch.no_grad()
def add_gram(total: Tensor, x: Tensor) -> None:
    """total (K, K) float32 += x^T x on and below the diagonal, for inputs x (tokens, K) of any floating dtype.

    What is above the diagonal is not to be read: see `mirrored`.
    """
    width = x.shape[1]
    step = max(NARROW, -(-width // STRIPES))
    narrow = x.dtype == torch.bfloat16
    for part in x.split(TOKENS) if narrow and not x.is_cuda else (x if narrow else x.float(),):
        for start in range(0, width, step):
            stop = min(start + step, width)
            rows, here = part[:, start:stop].T, total[start:stop, :stop]
            if not narrow:
                here.addmm_(rows, part[:, :stop])
            elif x.is_cuda:
                here += torch.mm(rows, part[:, :stop], out_dtype=torch.float32)
            else:
                here += rows @ part[:, :stop]


def mirrored(total: Tensor) -> Tensor:
    """The whole symmetric matrix (K, K) of which `total` holds the lower triangle."""
    whole = total.tril()
    return whole.add_(whole.tril(-1).T)
