"""From measurements and bounds to verdict.json."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gate import statistics
from gate._bootstrap import Sampling
from gate._check import FAILED, UNDECIDED, Check, Fault
from gate.stage import table
from gate.stage._content import write_json
from qat import plugins
from qat.artifact import Artifact
from qat.scheme import Section

WORST_FIRST = ("refused", "anomalous", "inconclusive", "released")


@dataclass(frozen=True)
class Exported:
    """An exported directory to judge. engines: those that must load it. artifact: what it was exported from.

    gate: its own options by the name of a check, where they differ from the others'.
    """

    name: str
    directory: Path
    engines: Collection[str]
    key: str = ""
    artifact: Artifact | None = None
    baseline: str | None = None
    seconds: float | None = None
    gate: Mapping[str, Section] | None = None


def verdict(
    path: Path,
    measured: dict[str, Any],
    exports: Sequence[Exported],
    faults: Mapping[str, list[dict[str, Any]]],
    gate: Mapping[str, Section],
) -> dict[str, Any]:
    """Judge every export, write `path` and return what is in it. An export without a measurement is refused."""
    states, vocabulary = measured["states"], measured["evaluation"]["vocabulary"]
    parent = next(iter(states.values()))
    sure = _statistics(gate)
    sampling = Sampling(sure.confidence, sure.resamples, sure.seed)
    judged: dict[str, dict[str, Any]] = {}
    for export in exports:
        listed, checks, strange = list(faults.get(export.name, [])), list[Check](), list[str]()
        state = states.get(export.name)
        if state is not None and state["perplexity"] is None:
            what = "its logits are not finite on the evaluation text"
            listed.append(Fault("finite", export.name, what, "they must be", "look at its scales and biases").as_dict())
        elif state is not None:
            strange = list(statistics.anomalies(state, parent, vocabulary, _statistics(export.gate or gate), sampling))
            if not strange:
                checks = list(_checks(state, parent, export.gate or gate, sampling))
        status = _status(state is not None and not listed, strange, checks)
        judged[export.name] = {
            "path": os.path.relpath(export.directory, path.parent),
            "format": state["format"] if state else None,
            "status": status,
            "released": status == "released",
            "faults": listed,
            "anomalies": strange,
            "checks": [check.as_dict() for check in checks],
        }
    found = {export["status"] for export in judged.values()} or {"refused"}
    out = {
        "schema": 1,
        "status": next(status for status in WORST_FIRST if status in found),
        "exports": judged,
        "checks": [{"export": name, **check} for name, e in judged.items() for check in e["checks"]],
        "statistics": sure.model_dump(),
        "table": table.rows(states, {name: e["faults"] for name, e in judged.items()}, sampling),
        "tasks": table.tasks(states, sampling),
        "latency": table.latency(states, sampling),
        **measured,
    }
    write_json(path, out)
    return out


def _statistics(gate: Mapping[str, Section]) -> statistics.Options:
    given = gate.get("statistics")  # a class that plugins.options made of the same text
    return statistics.Options.model_validate(given.model_dump() if given else {})


def _checks(
    state: dict[str, Any], parent: dict[str, Any], gate: Mapping[str, Section], sampling: Sampling
) -> list[Check]:
    checks: list[Check] = []
    for name, options in gate.items():
        judge = getattr(plugins.find("gate", name), "judge", None)
        checks += judge(state, parent, options, sampling) if judge else []
    return checks


def _status(sound: bool, anomalies: Sequence[str], checks: Sequence[Check]) -> str:
    """sound: it was measured and has no fault."""
    outcomes = {check.outcome for check in checks}
    if not sound or (not anomalies and FAILED in outcomes):
        return "refused"
    if anomalies:
        return "anomalous"
    return "inconclusive" if UNDECIDED in outcomes else "released"


def problems(verdict: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(status, export, sentence) for everything that keeps an export from being released."""
    found = []
    for name, judged in verdict["exports"].items():
        found += [("refused", name, fault["text"]) for fault in judged["faults"]]
        found += [("anomalous", name, text) for text in judged["anomalies"]]
        for check in judged["checks"]:
            if not check["passed"]:
                found.append(("refused" if check["outcome"] == FAILED else "inconclusive", name, check["text"]))
    return found
