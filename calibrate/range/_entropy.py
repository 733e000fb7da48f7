"""Entropy calibration: the clip that loses least of the distribution of the magnitudes.

After Migacz, "8-bit Inference with TensorRT", GTC 2017. For a clip T, the reference P is the histogram up to T with the
mass beyond T added to its last bin, for that is where clipping puts it. The candidate Q is what the number format can
still tell apart: the histogram up to T, without that mass, with the count of each level spread over the bins that round
to the level. Both are made to sum to 1, and T minimises KL(P || Q). Q must be without the mass beyond T: given to both,
clipping costs nothing, and the smallest T wins.

Where we differ. The levels are those of the format (E4M3's are not evenly spaced), each with the bins that round to it,
so the first is half as wide. Bins are not equally wide, so a level's count is spread by width; as there, over bins that
are not empty. Exact zeros are left out: every clip stores them exactly. The last bin is the last one not empty, or Q
would have no mass where P has some.
"""

from __future__ import annotations

import torch
from torch import Tensor

from calibrate.range._clip import levels, nearest, scale_of
from qat.scheme import TensorFormat

LEAST = 1000  # values; of fewer, each has a bin of its own, Q equals P at the widest clip, and that always wins


def enough(values: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Those that are not zero of magnitudes and their counts (B,). Raises ValueError when that is too few to go by."""
    total, kept = counts.sum().item(), values > 0
    seen = counts[kept].sum().item()
    if total < LEAST or 0 < seen < LEAST:
        raise ValueError(
            f"entropy calibration needs {LEAST} values that are not zero, and saw {seen:.0f} (and {total - seen:.0f} "
            "zeros): of so few each has its own bin, and no clip could look better than none; calibrate on more text, "
            "or set calibrate.inputs to mse or max"
        )
    return values[kept], counts[kept]


def widths(values: Tensor) -> Tensor:
    """How far the bins reach, float64 (B,), of bfloat16 magnitudes: from half-way to one neighbour to the other."""
    bits = values.bfloat16().view(torch.int16)
    below, above = (bits + step for step in (-1, 1))
    return (above.view(torch.bfloat16).double() - below.view(torch.bfloat16).double()) / 2


def divergence(values: Tensor, counts: Tensor, tried: Tensor, fmt: TensorFormat) -> Tensor:
    """KL(P || Q) float64 (C,) for clips (C,), from positive magnitudes ascending and their counts (B,), float64.

    Infinite for a clip below all magnitudes.
    """
    grid = levels(fmt)
    kept = values <= tried[:, None]  # (C, B)
    cell = nearest(values, scale_of(tried, fmt), grid)
    inside, wide = kept * counts, kept * widths(values)
    empty = torch.zeros(len(tried), len(grid), dtype=torch.float64)
    density = empty.scatter_add(1, cell, inside) / empty.scatter_add(1, cell, wide)  # 0 / 0 for a level without bins
    q = wide * density.gather(1, cell).nan_to_num()
    p = inside.scatter_add(1, kept.sum(1, keepdim=True).sub(1).clamp_min(0), counts.sum() - inside.sum(1, keepdim=True))
    p, q = p / counts.sum(), q / q.sum(1, keepdim=True)
    terms = torch.where(kept, p * (p / q).log(), 0.0)
    return torch.where(kept.any(1), terms.sum(1), torch.inf)
