"""Fused groups of linears with what each candidate format takes and costs: sums, tables, overrides. No torch."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qat import report
from qat.scheme import Scheme, TensorFormat

SKIP = "skip"  # the candidate that leaves a group as it is, in 16 bits


@dataclass(frozen=True)
class Group:
    """Linears that take one format together. By candidate: bits stored, and KL in nats per token.

    names: of the linears, full. pattern: one that matches them all and no other linear, or None.
    """

    names: list[str]
    pattern: str | None
    weights: int
    bits: dict[str, int]
    kl: dict[str, float] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return self.pattern or ", ".join([self.names[0], *(name.rpartition(".")[2] for name in self.names[1:])])


def stored_bits(fmt: TensorFormat | None, rows: int, columns: int) -> int:
    """Bits of codes, scales (16; 32 for fp8) and zero points (4) of a weight (rows, columns); None: 16 a weight."""
    if fmt is None:
        return 16 * rows * columns
    scales = fmt.scale_shape(rows, columns)
    each = (16 if fmt.is_int else 32) + (0 if fmt.symmetric else 4)
    return rows * columns * fmt.bits + scales[0] * scales[1] * each


def totals(groups: Sequence[Group], chosen: Sequence[str]) -> tuple[float, float]:
    """Bits per weight and the sum of KL when each group takes its candidate."""
    pairs = list(zip(groups, chosen, strict=True))
    weights = sum(group.weights for group in groups)
    return sum(group.bits[label] for group, label in pairs) / weights, sum(group.kl[label] for group, label in pairs)


def overrides(
    groups: Sequence[Group], chosen: Sequence[str], candidates: Mapping[str, TensorFormat | None], scheme: Scheme
) -> dict[str, Any]:
    """`overrides`, and `skip` where a group stays as it is, for the section of a recipe that gave `scheme`."""
    found: dict[str, Any] = {}
    skip: list[str] = []
    for group, label in zip(groups, chosen, strict=True):
        fmt, names = candidates[label], [group.pattern] if group.pattern else group.names
        if fmt is None:
            skip += names
        elif fmt != scheme.weights:
            found |= {name: {"dtype": fmt.dtype, **fmt.model_dump(exclude_defaults=True)} for name in names}
    return {"overrides": found} | ({"skip": [*scheme.skip, *skip]} if skip else {})


def show(groups: Sequence[Group], chosen: Sequence[str] | None) -> None:
    """The table, largest KL first, and what whole models come to."""
    labels = [label for label in groups[0].kl if label != SKIP]
    first = labels[0]
    choices: Sequence[str | None] = chosen or [None] * len(groups)
    pairs = sorted(zip(groups, choices, strict=True), key=lambda pair: -pair[0].kl[first])
    rows = [
        (group.title, group.weights / 1e6, *(group.kl[label] for label in labels), choice) for group, choice in pairs
    ]
    columns = ["group", "10^6 weights", *(f"KL {label}" for label in labels), "choice"]
    report.table("KL that each group adds, nats per token, estimated on the calibration text", columns, rows)
    whole = [(f"all {label}", *totals(groups, [label] * len(groups))) for label in labels]
    whole += [("the choice", *totals(groups, chosen))] if chosen else []
    report.table("sums over all groups", ["scheme", "bits/w", "KL"], whole)


def write_table(groups: Sequence[Group], chosen: Sequence[str] | None, path: Path) -> None:
    """A line for each group and candidate, in the order of the model. chosen: 1 or 0, empty without a budget."""
    with path.open("w", newline="", encoding="utf-8") as f:
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow(["group", "weights", "candidate", "bits_per_weight", "kl", "chosen"])
        for index, group in enumerate(groups):
            for label, bits in group.bits.items():
                mark = "" if chosen is None else int(chosen[index] == label)
                writer.writerow([group.title, group.weights, label, bits / group.weights, group.kl[label], mark])
