"""Runs one after the other in one process leave nothing behind; benchmarks/soak.py does two hundred."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak import RECIPES, growth, soak

KEPT = ("files", "threads", "python_threads", "temporary", "torn", "in_output")


@pytest.mark.slow
def test_runs_in_one_process_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TARE_LOG", "quiet")
    chosen = (RECIPES[0], RECIPES[-1])  # one with every stage, one that fails
    samples = soak(8, tmp_path, chosen)
    found = growth(samples, first=2)
    assert {key: found[key] for key in KEPT} == dict.fromkeys(KEPT, 0)
    # every run would keep a hundred objects if its job, or what it trained, stayed
    assert found["objects"] < 20
    assert found["rss"] < 2e6, [sample["rss"] for sample in samples]
