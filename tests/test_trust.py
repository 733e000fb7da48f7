"""What a pipeline may rely on: nothing is released that was not measured, and no old verdict stands for a new run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from qat.plugins import ROOT
from qat.train import main

TEXT = ROOT / "recipes/demo/text"


def micro(output: Path, *more: str) -> int:
    return main(["recipe=micro.yaml", f"output={output}", "train=null", "compute.device=cpu", *more])


def summary(output: Path) -> dict[str, Any]:
    return json.loads((output / "micro/summary.json").read_text())


def test_bytes_that_changed_after_they_were_measured_are_not_released(tmp_path: Path) -> None:
    assert micro(tmp_path, "gate.divergence.max_kl=1e-9") == 3
    (file,) = tmp_path.glob("micro/export-*/compressed_tensors/model.safetensors")
    damaged = bytearray(file.read_bytes())
    damaged[-100] ^= 1
    file.write_bytes(damaged)
    assert micro(tmp_path, "gate.divergence.max_kl=9") == 1
    assert summary(tmp_path)["status"] == "failed" and "was changed after it was exported" in summary(tmp_path)["error"]
    assert not list(tmp_path.glob("micro/release-*[0-9a-f]"))
    assert micro(tmp_path, "gate.divergence.max_kl=9", "fresh=export") == 0


def test_an_older_verdict_does_not_stand_for_a_run_that_never_finished(tmp_path: Path) -> None:
    assert micro(tmp_path) == 0 and summary(tmp_path)["status"] == "released"
    released = summary(tmp_path)["last_released"]
    assert micro(tmp_path, "train.steps=ten") == 2
    assert summary(tmp_path)["status"] == "failed" and "train" in summary(tmp_path)["error"]
    assert micro(tmp_path) == 0 and summary(tmp_path)["last_released"] == released


def test_a_run_says_failed_until_it_has_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("qat.pipeline.judge", lambda job: seen.append(summary(tmp_path)["status"]))
    assert micro(tmp_path) == 0
    assert seen == ["failed"] and summary(tmp_path)["status"] == "ungated"


@pytest.mark.parametrize("part", ["calibration", "training"])
def test_a_model_is_not_judged_on_text_that_it_was_made_with(
    tmp_path: Path, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copy(TEXT / f"{part}.txt", tmp_path / "copy.txt")
    as_lines = tmp_path / "copy.jsonl"
    as_lines.write_text(json.dumps({"text": (TEXT / f"{part}.txt").read_text()}))
    for text in (copy, as_lines):
        arguments = ["recipe=micro.yaml", f"output={tmp_path / 'out'}", f"data.evaluation.source={text}"]
        more = ["data.calibration.seed=0", "data.evaluation.sequences=null"] if part == "calibration" else []
        assert main([*arguments, *more]) == 1
        assert f"holds text of data.{part}" in capsys.readouterr().err
