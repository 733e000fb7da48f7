"""The table of all states: rows for JSON, text for a person."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gate import _paired
from gate._bootstrap import Interval, Sampling

COLUMNS = (  # key of the row, heading, format
    ("state", "state", ""),
    ("format", "format", ""),
    ("perplexity", "ppl", ".3f"),
    ("kl", "KL", ".5f"),
    ("kl_stderr", "s.e.", ".5f"),
    ("top1", "top-1", ".2%"),
    ("accuracy", "tasks", ".2%"),
    ("perplexity_recovered", "ppl rec.", "z.1%"),
    ("kl_recovered", "KL rec.", "z.1%"),
    ("megabytes", "MB", ".2f"),
    ("bits_per_weight", "bits/w", ".2f"),
    ("seconds", "s", ".1f"),
    ("note", "note", ""),
)


def rows(
    states: dict[str, dict[str, Any]], faults: dict[str, list[dict[str, Any]]], sampling: Sampling
) -> list[dict[str, Any]]:
    """One row a state, the parent first; then exports with faults, which were not measured.

    *_recovered: the share of the baseline's (round-to-nearest) loss that this state does not have any more; None where
    that loss itself cannot be told from noise, as of a random model.
    kl_low, kl_high, increase_low, increase_high: the confidence intervals of the KL and of the perplexity's relative
    increase over the parent's. accuracy: the mean score over tasks.
    """
    parent = next(iter(states.values()))
    found = []
    for name, state in states.items():
        baseline = states.get(state["baseline"]) if state["baseline"] else None
        row = {"state": name, "format": state["format"]}
        row |= {key: state[key] for key in ("perplexity", "kl", "kl_stderr", "top1", "size_on_disk", "bits_per_weight")}
        increase = _increase(state, parent, sampling)
        for key, estimate in (("kl", _paired.kl(state, sampling)), ("increase", increase)):
            row |= {f"{key}_low": estimate and estimate.low, f"{key}_high": estimate and estimate.high}
        row["increase"] = increase and increase.value
        scores = [task["score"] for task in state.get("tasks", {}).values()]
        row["accuracy"] = math.fsum(scores) / len(scores) if scores else None
        row |= {"bits_per_parameter": state["bits_per_parameter"], "seconds": state["seconds"]}
        row["perplexity_recovered"] = row["kl_recovered"] = None
        if baseline and baseline is not state:
            for key, lost in _lost(baseline, parent, sampling).items():
                row[f"{key}_recovered"] = _recovered(state, baseline, key, parent[key]) if lost else None
        row["note"] = f"same tensors as {state['same_as']}" if state["same_as"] else ""
        found.append(row)
    empty = dict.fromkeys(found[0])
    for name, listed in faults.items():
        if name not in states:
            found.append({**empty, "state": name, "note": f"not measured: {len(listed)} fault{'s'[: len(listed) > 1]}"})
    return found


TASKS = (
    ("state", "answers", ""),
    ("task", "task", ""),
    ("metric", "metric", ""),
    ("examples", "examples", "d"),
    ("score", "score", ".2%"),
    ("gain", "against parent", "+z.2%"),
    ("gain_low", "from", "+z.2%"),
    ("gain_high", "to", "+z.2%"),
)


def tasks(states: dict[str, dict[str, Any]], sampling: Sampling) -> list[dict[str, Any]]:
    """A row for each task and state that was asked, the parent's first; the gain over the parent with its interval."""
    asked = {name: state["tasks"] for name, state in states.items() if state.get("tasks")}
    parent, found = next(iter(states.values())), []
    for task in next(iter(asked.values()), {}):
        for name, own in asked.items():
            one, gain = own[task], None
            if states[name] is not parent and len(one["scores"]) == len(parent["tasks"][task]["scores"]):
                gain = _paired.gain(task, states[name], parent, sampling)
            row = {"state": name, "task": task, "metric": one["metric"], "examples": len(one["scores"])}
            row |= {"score": one["score"], "gain": gain and gain.value}
            found.append(row | {"gain_low": gain and gain.low, "gain_high": gain and gain.high})
    return found


LATENCY = (
    ("state", "served", ""),
    ("batch", "batch", "d"),
    ("memory_gb", "GB", ".2f"),
    ("first_token_ms", "first token ms", ".2f"),
    ("inter_token_ms", "between tokens ms", ".3f"),
    ("tokens_per_s", "tokens/s", ".1f"),
    ("first_token_ratio", "first ratio", ".3f"),
    ("inter_token_ratio", "between ratio", ".3f"),
    ("throughput_ratio", "tokens/s ratio", ".3f"),
    ("note", "note", ""),
)
RATIOS = {
    "first_token_ratio": "first_token_s",
    "inter_token_ratio": "inter_token_s",
    "throughput_ratio": "tokens_per_s",
}


def latency(states: dict[str, dict[str, Any]], sampling: Sampling) -> list[dict[str, Any]]:
    """A row for each state that was served and each batch; means over pairs, ratios to the parent's with intervals."""
    served = {name: state["latency"] for name, state in states.items() if "latency" in state}
    found: list[dict[str, Any]] = []
    for name, one in served.items():
        parent = next(iter(served.values()))
        if "error" in one:
            found.append({**dict.fromkeys(found[0]), "state": name, "note": "not served: " + one["error"]})
            continue
        for batch, numbers in one["batches"].items():
            means = {key: math.fsum(values) / len(values) for key, values in numbers.items()}
            row = {"state": name, "batch": int(batch), "memory_gb": one["memory_gb"]}
            row |= {"first_token_ms": 1e3 * means["first_token_s"], "inter_token_ms": 1e3 * means["inter_token_s"]}
            row["tokens_per_s"] = means["tokens_per_s"]
            for ratio, key in RATIOS.items():
                own = parent["batches"][batch][key]
                to_parent = _paired.ratio(numbers[key], own, sampling) if one is not parent else None
                row |= {ratio: to_parent and to_parent.value}
                row |= {f"{ratio}_low": to_parent and to_parent.low, f"{ratio}_high": to_parent and to_parent.high}
            found.append({**row, "note": ""})
    return found


def _increase(state: dict[str, Any], parent: dict[str, Any], sampling: Sampling) -> Interval | None:
    """Of the perplexity over the parent's; None where they were measured on different numbers of windows."""
    same_text = len(state["windows"]["nll"]) == len(parent["windows"]["nll"])
    return _paired.perplexity_increase(state, parent, sampling) if same_text else None


def _recovered(state: dict[str, Any], baseline: dict[str, Any], key: str, ideal: float) -> float | None:
    if state[key] is None or baseline[key] is None:
        return None
    return (baseline[key] - state[key]) / (baseline[key] - ideal)


def _lost(baseline: dict[str, Any], parent: dict[str, Any], sampling: Sampling) -> dict[str, bool]:
    """Whether a baseline has certainly lost something, in perplexity and in KL: its whole interval is above 0."""
    found = {"perplexity": _increase(baseline, parent, sampling), "kl": _paired.kl(baseline, sampling)}
    return {key: one is not None and one.low is not None and one.low > _paired.LEAST for key, one in found.items()}


def text(table: Sequence[dict[str, Any]], columns: Sequence[tuple[str, str, str]] = COLUMNS) -> str:
    """The table as aligned lines; columns without any value are left out."""
    cells: list[list[str]] = []
    for row in table:
        size = row.get("size_on_disk")
        shown = {**row, "megabytes": None if size is None else size / 1e6}
        cells.append([cell(shown[key], spec) for key, _, spec in columns])
    used = [i for i in range(len(columns)) if any(line[i] for line in cells)]
    lines = [[columns[i][1] for i in used], *([line[i] for i in used] for line in cells)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(used))]
    is_text = [columns[i][2] == "" for i in used]
    return "\n".join(
        "  ".join(c.ljust(w) if left else c.rjust(w) for c, w, left in zip(line, widths, is_text, strict=True)).rstrip()
        for line in lines
    )


def cell(value: Any, spec: str) -> str:
    """A value as the table writes it; empty for None."""
    return "" if value is None else format(value, spec)
