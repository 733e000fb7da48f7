"""What a person sees, and that only one rank speaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from qat import report


class Clock:
    """Stands in for monotonic: each step takes `step` seconds."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def progress(monkeypatch: pytest.MonkeyPatch, seconds_a_step: float, done: int = 0) -> None:
    monkeypatch.setattr(report, "monotonic", Clock(seconds_a_step))
    with report.Steps("calibrate", total=28, unit="block") as steps:
        for block in range(done, 28):
            steps.at(block + 1, "err 0.0031")


def test_progress_is_a_line_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    progress(monkeypatch, 2.0)
    lines = capsys.readouterr().out.splitlines()
    # the first after more than 3 seconds, the next at 4 + 10, 24, 34, 44, 54; none for the last step
    assert lines[0] == "calibrate  block 2/28  err 0.0031  eta 52s"
    assert [line.split()[2] for line in lines] == ["2/28", "7/28", "12/28", "17/28", "22/28", "27/28"]


def test_a_resumed_stage_estimates_from_this_sitting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    progress(monkeypatch, 30.0, done=18)
    assert capsys.readouterr().out.splitlines()[0] == "calibrate  block 19/28  err 0.0031  eta 4m"


def test_short_work_and_other_ranks_say_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    progress(monkeypatch, 0.01)
    monkeypatch.setenv("TARE_PROGRESS", "0")
    progress(monkeypatch, 30.0)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    report.say("x")
    report.heading("x")
    report.complain("x")
    report.table("x", ["x"], [[1]])
    assert capsys.readouterr() == ("", "")


def test_markup_in_a_text_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    report.say("tensor [bold]x[/bold] of " + "long " * 60)
    report.complain("data.[key]: wrong")
    report.table("t", ["format", "kl"], [["[red]", 0.123456], ["awq", None]])
    out, err = capsys.readouterr()
    assert "tensor [bold]x[/bold]" in out and len(out.splitlines()[0]) > 300
    assert "[red]" in out and "0.1235" in out and err == "data.[key]: wrong\n"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0s"), (89, "89s"), (120, "2m"), (3900, "1h05m"), (3599, "1h00m")])
def test_durations(seconds: float, text: str) -> None:
    assert report.duration(seconds) == text


def test_a_wrong_log_format_is_one_line_and_touches_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from qat.train import main

    monkeypatch.setenv("TARE_LOG", "loud")
    assert main(["recipe=micro.yaml", f"output={tmp_path}"]) == 2
    assert "TARE_LOG is 'loud'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
