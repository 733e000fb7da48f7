"""Exports through the steps of the gate, in the order in which qat/pipeline.py takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from gate import stage
from gate.stage import Exported, State
from qat.scheme import Section


def judge(
    path: Path,
    parent: State,
    states: Sequence[State],
    exports: Sequence[Exported],
    windows: Tensor,
    gate: Mapping[str, Section],
    cache: Path,
) -> dict[str, Any]:
    """Lint, measure and judge; what is in `path`, verdict.json. states: between parent and exports."""
    faults, sound = stage.inspect_all(exports, gate, cache)
    measured = stage.measure_all(parent, [*states, *sound], windows, cache)
    return stage.verdict(path, measured, exports, faults, gate)
