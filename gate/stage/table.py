"""The table of all states: rows for JSON, text for a person."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gate import _paired
from gate._bootstrap import Sampling

COLUMNS = (  # key of the row, heading, format
    ("state", "state", ""),
    ("format", "format", ""),
    ("perplexity", "ppl", ".3f"),
    ("kl", "KL", ".5f"),
    ("kl_stderr", "s.e.", ".5f"),
    ("top1", "top-1", ".2%"),
    ("perplexity_recovered", "ppl rec.", ".1%"),
    ("kl_recovered", "KL rec.", ".1%"),
    ("megabytes", "MB", ".2f"),
    ("bits_per_weight", "bits/w", ".2f"),
    ("seconds", "s", ".1f"),
    ("note", "note", ""),
)


def rows(
    states: dict[str, dict[str, Any]], faults: dict[str, list[dict[str, Any]]], sampling: Sampling
) -> list[dict[str, Any]]:
    """One row a state, the parent first; then exports with faults, which were not measured.

    *_recovered: the share of the baseline's (round-to-nearest) loss that this state does not have any more.
    kl_low, kl_high, increase_low, increase_high: the confidence intervals of the KL and of the perplexity's relative
    increase over the parent's.
    """
    parent = next(iter(states.values()))
    found = []
    for name, state in states.items():
        baseline = states.get(state["baseline"]) if state["baseline"] else None
        row = {"state": name, "format": state["format"]}
        row |= {key: state[key] for key in ("perplexity", "kl", "kl_stderr", "top1", "size_on_disk", "bits_per_weight")}
        same_text = len(state["windows"]["nll"]) == len(parent["windows"]["nll"])
        increase = _paired.perplexity_increase(state, parent, sampling) if same_text else None
        for key, estimate in (("kl", _paired.kl(state, sampling)), ("increase", increase)):
            row |= {f"{key}_low": estimate and estimate.low, f"{key}_high": estimate and estimate.high}
        row["increase"] = increase and increase.value
        row |= {"bits_per_parameter": state["bits_per_parameter"], "seconds": state["seconds"]}
        row["perplexity_recovered"] = row["kl_recovered"] = None
        if baseline and baseline is not state:
            row["perplexity_recovered"] = _recovered(state, baseline, "perplexity", parent["perplexity"])
            row["kl_recovered"] = _recovered(state, baseline, "kl", 0.0)
        row["note"] = f"same tensors as {state['same_as']}" if state["same_as"] else ""
        found.append(row)
    empty = dict.fromkeys(found[0])
    for name, listed in faults.items():
        if name not in states:
            found.append({**empty, "state": name, "note": f"not measured: {len(listed)} fault{'s'[: len(listed) > 1]}"})
    return found


def _recovered(state: dict[str, Any], baseline: dict[str, Any], key: str, ideal: float) -> float | None:
    if state[key] is None or baseline[key] is None or baseline[key] <= ideal:
        return None
    return (baseline[key] - state[key]) / (baseline[key] - ideal)


def text(table: Sequence[dict[str, Any]]) -> str:
    """The table as aligned lines; columns without any value are left out."""
    cells: list[list[str]] = []
    for row in table:
        size = row["size_on_disk"]
        shown = {**row, "megabytes": None if size is None else size / 1e6}
        cells.append([cell(shown[key], spec) for key, _, spec in COLUMNS])
    used = [i for i in range(len(COLUMNS)) if any(line[i] for line in cells)]
    lines = [[COLUMNS[i][1] for i in used], *([line[i] for i in used] for line in cells)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(used))]
    is_text = [COLUMNS[i][2] == "" for i in used]
    return "\n".join(
        "  ".join(c.ljust(w) if left else c.rjust(w) for c, w, left in zip(line, widths, is_text, strict=True)).rstrip()
        for line in lines
    )


def cell(value: Any, spec: str) -> str:
    """A value as the table writes it; empty for None."""
    return "" if value is None else format(value, spec)
