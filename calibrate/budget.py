"""Which format each group of linears takes so that the sum of losses is least and the stored bits fit a budget.

The multiple-choice knapsack, by dynamic programming over the bits that a choice takes beyond the smallest one
(Kellerer, Pferschy, Pisinger, Knapsack Problems, 2004, section 11.5), in units of the largest number of bits that
divides them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

CELLS = 2**16  # of budget at most; with more, bits are rounded up to a larger unit: still within the budget


def allocate(losses: Sequence[Sequence[float]], bits: Sequence[Sequence[int]], budget: int) -> list[int]:
    """The index of the choice of each group. losses, bits: of each group, of each choice; sizes in bits.

    Exact while all sizes are multiples of budget / CELLS; with a unit rounded up, what is unused is at most one unit a
    group. Of equal losses the choice with fewer bits is taken. Raises ValueError for a budget that not even the
    smallest choices meet.
    """
    least = [min(sizes) for sizes in bits]
    room = budget - sum(least)
    if room < 0:
        raise ValueError(f"{budget} bits are fewer than the {sum(least)} of the smallest choices")
    extra = [[size - smallest for size in sizes] for sizes, smallest in zip(bits, least, strict=True)]
    room = min(room, sum(map(max, extra)))
    unit = max(math.gcd(*(size for sizes in extra for size in sizes)), -(-room // CELLS), 1)
    cells = room // unit
    best = np.zeros(cells + 1)  # least loss of the groups so far with at most so many units
    taken: list[np.ndarray] = []
    for loss, sizes in zip(losses, extra, strict=True):
        now, choice = np.full(cells + 1, np.inf), np.zeros(cells + 1, np.int16)
        for index in sorted(range(len(sizes)), key=lambda i: (sizes[i], loss[i], i)):
            step = -(-sizes[index] // unit)
            if step > cells:
                continue
            after = np.full(cells + 1, np.inf)
            after[step:] = best[: cells + 1 - step] + loss[index]
            better = after < now
            now[better], choice[better] = after[better], index
        best, taken = now, [*taken, choice]
    left, chosen = cells, list[int]()
    for choice, sizes in zip(reversed(taken), reversed(extra), strict=True):
        chosen.append(int(choice[left]))
        left -= -(-sizes[chosen[-1]] // unit)
    return chosen[::-1]
