"""The stage cache: what is reused, what is not, and what survives a crash."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qat import manifest
from qat.peak import Peak
from qat.ranks import RunError
from qat.recipe import Recipe, load
from qat.stages import EXIT_CODES, UNFINISHED, Run, Stage
from qat.unjudged import disown

REPOSITORY = Path(__file__).resolve().parent.parent
ROOT = {"parent": {"model.safetensors": "1"}, "calibration": "2", "training": "3", "evaluation": "4"}


def writes(text: str, calls: list[str]) -> Callable[[Path], dict[str, Any]]:
    def work(partial: Path) -> dict[str, Any]:
        calls.append(text)
        (partial / "out").mkdir(exist_ok=True)
        (partial / "out" / "file.txt").write_text(text)
        return {"length": len(text)}

    return work


def two_stages(recipe: Recipe, calls: list[str], first: str = "a", second: str = "b") -> list[Stage]:
    with Run(recipe) as run:
        one = run.stage("calibrate", content={"x": 1}, work=writes(first, calls))
        two = run.stage("train", content={"y": 1}, parents=[one], work=writes(second, calls))
        run.finish("ungated")
    return [one, two]


def test_a_finished_stage_is_reused(fake_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, calls = load(["recipe=small.yaml"]), []
    first = two_stages(recipe, calls)
    second = two_stages(recipe, calls)
    assert calls == ["a", "b"]
    assert [stage.reused for stage in first + second] == [False, False, True, True]
    assert [stage.path for stage in first] == [stage.path for stage in second]
    assert first[0].metrics == second[0].metrics == {"length": 1}
    assert f"train-{first[1].key}: reused" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EIO, "Input/output error"), r"\[Errno 5\] Input/output error: '.*/small/gate-\w+\.partial'"),
        (OSError(errno.EIO, "Input/output error", "a"), r"\[Errno 5\] Input/output error: 'a'"),
        (ConnectionError("Couldn't reach the hub"), "Couldn't reach the hub"),
    ],
)
def test_an_error_of_the_system_says_where_and_one_of_a_library_what(
    fake_root: Path, error: OSError, said: str
) -> None:
    def work(out: Path) -> dict[str, Any]:
        raise error

    with pytest.raises(OSError) as caught, Run(load(["recipe=small.yaml"])) as run:
        run.stage("gate", content={}, parents=[], work=work)
    assert re.fullmatch(said, str(caught.value))


def test_the_manifest_says_what_a_result_depends_on(fake_root: Path) -> None:
    recipe = load(["recipe=small.yaml"])
    one, two = two_stages(recipe, [])
    found = json.loads((two.path / "manifest.json").read_text())
    assert found["parents"] == [{"name": "calibrate", "key": one.key, "digest": one.digest}]
    expected = "3e23e8160039594a33894f6564e1b1348bbd7a0088d42c4acb73eeaed59c009d"  # printf b | sha256sum
    assert found["files"] == {"out/file.txt": {"sha256": expected, "size": 1}}
    assert Recipe.model_validate(found["recipe"]) == recipe
    assert found["seeds"] == {"data.calibration.seed": 0, "data.evaluation.seed": None, "train.seed": 0}
    assert manifest.seeds({"train": [{"seed": 1}, {"steps": 2, "seed": 3}]}) == {"train.0.seed": 1, "train.1.seed": 3}
    assert found["versions"]["python"] == sys.version.split()[0]
    assert 0 <= found["seconds"] < 60 and 0.01 < found["peak_rss_gb"] < 100
    assert str(fake_root) not in json.dumps(found)


def test_a_stage_that_was_interrupted_gets_its_own_folder_back(fake_root: Path) -> None:
    recipe = load(["recipe=small.yaml"])

    def breaks(partial: Path) -> dict[str, Any]:
        (partial / "half").write_text("done so far")
        raise ValueError("token hf_abcdefghijklmnop is no good")

    with pytest.raises(ValueError, match="no good"), Run(recipe) as run:
        run.stage("train", content={"y": 1}, work=breaks)
    summary = json.loads((recipe.folder / "summary.json").read_text())
    assert summary["status"] == "failed" and summary["error"] == "ValueError: token hf_*** is no good"

    def resumes(partial: Path) -> dict[str, Any]:
        assert (partial / "half").read_text() == "done so far"
        return {}

    def starts_empty(partial: Path) -> dict[str, Any]:
        assert not list(partial.iterdir())
        return {}

    with Run(recipe) as run:
        run.stage("train", content={"y": 2}, work=starts_empty)
        made = run.stage("train", content={"y": 1}, work=resumes)
    assert not list(recipe.folder.glob("*.partial"))
    assert set(made.manifest["files"]) == {"half"}


def test_fresh_keeps_the_old_stage_until_the_new_one_is_whole(fake_root: Path) -> None:
    recipe, calls = load(["recipe=small.yaml"]), []
    old = two_stages(recipe, calls)
    fresh = load(["recipe=small.yaml", "fresh=train"])

    def breaks(partial: Path) -> dict[str, Any]:
        assert not list(partial.iterdir())
        raise KeyError("x")

    with pytest.raises(KeyError), Run(fresh) as run:
        one = run.stage("calibrate", content={"x": 1}, work=breaks)
        run.stage("train", content={"y": 1}, parents=[one], work=breaks)
    assert (old[1].path / "out" / "file.txt").read_text() == "b"
    new = two_stages(fresh, calls, second="c")
    assert calls == ["a", "b", "c"] and new[1].path == old[1].path
    assert (new[1].path / "out" / "file.txt").read_text() == "c"
    assert sorted(p.name for p in recipe.folder.iterdir() if not p.name.startswith(".")) == sorted(
        [old[0].path.name, old[1].path.name, "junit.xml", "summary.json", "summary.md"]
    )


def test_what_follows_from_other_bytes_is_made_again(fake_root: Path) -> None:
    recipe, calls = load(["recipe=small.yaml"]), []
    two_stages(recipe, calls)
    two_stages(load(["recipe=small.yaml", "fresh=calibrate"]), calls, first="a")  # the same bytes
    assert calls == ["a", "b", "a"]
    two_stages(load(["recipe=small.yaml", "fresh=calibrate"]), calls, first="A")
    assert calls == ["a", "b", "a", "A", "b"]


def test_a_damaged_stage_is_made_again(fake_root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, calls = load(["recipe=small.yaml"]), []
    one, two = two_stages(recipe, calls)
    (one.path / "out" / "file.txt").write_text("longer")
    (two.path / "out" / "file.txt").unlink()
    two_stages(recipe, calls)
    assert calls == ["a", "b", "a", "b"]
    said = capsys.readouterr().out
    assert "made again, out/file.txt has 6 bytes, not 1" in said
    assert "made again, out/file.txt is missing" in said


@pytest.mark.parametrize("crash", ["before the renames", "between the renames", "before the old one went"])
def test_a_crash_while_a_stage_is_put_in_place_loses_nothing(fake_root: Path, crash: str) -> None:
    recipe, calls = load(["recipe=small.yaml"]), []
    _, two = two_stages(recipe, calls)
    old, partial = (two.path.with_name(two.path.name + end) for end in (".old", ".partial"))
    if crash == "before the renames":
        two.path.rename(partial)
    elif crash == "between the renames":
        two.path.rename(old)
        subprocess.run(["cp", "-r", old, partial], check=True)
    else:
        subprocess.run(["cp", "-r", two.path, old], check=True)
    again = two_stages(recipe, calls)
    assert calls == ["a", "b"] and again[1].reused
    assert not old.exists() and not partial.exists()


def test_the_old_stage_comes_back_when_the_new_one_is_not_whole(fake_root: Path) -> None:
    recipe, calls = load(["recipe=small.yaml"]), []
    _, two = two_stages(recipe, calls)
    two.path.rename(two.path.with_name(two.path.name + ".old"))
    assert two_stages(recipe, calls)[1].reused and calls == ["a", "b"]


def test_equal_stages_of_two_variants_are_one(fake_root: Path) -> None:
    recipe, calls = load(["recipe=small.yaml", "fresh=calibrate"]), []
    with Run(recipe) as run:
        one = run.stage("calibrate", content={"x": 1}, variant="a", work=writes("a", calls))
        same = run.stage("calibrate", content={"x": 1}, variant="b", work=writes("b", calls))
    assert same is one and calls == ["a"]
    assert len(json.loads((recipe.folder / "summary.json").read_text())["stages"]) == 1


def test_a_stage_may_not_write_the_manifest(fake_root: Path) -> None:
    def writes_it(partial: Path) -> dict[str, Any]:
        (partial / "manifest.json").write_text("{}")
        return {}

    with pytest.raises(AssertionError, match=r"manifest\.json"), Run(load(["recipe=small.yaml"])) as run:
        run.stage("release", content={}, work=writes_it)


def test_summary_paths_are_relative_and_a_release_outlives_later_failures(fake_root: Path) -> None:
    recipe = load(["recipe=small.yaml"])
    with Run(recipe) as run:
        made = run.stage("release", content={}, work=writes("r", []))
        exports = {"awq": {"path": made.path, "format": "awq", "scheme": "int4", "engines": ["vllm"], "released": True}}
        code = run.finish("released", exports=exports, verdict=made.path / "v.json", last_released=made.path)
    summary = json.loads((recipe.folder / "summary.json").read_text())
    assert code == 0 and summary["status"] == "released"
    assert summary["exports"]["awq"]["path"] == summary["last_released"] == made.path.name
    assert summary["verdict"] == f"{made.path.name}/v.json" and summary["report"] is None
    line = summary["stages"][0]
    assert (line["name"], line["key"], line["path"], line["reused"]) == ("release", made.key, made.path.name, False)
    assert line["metrics"] == {"length": 1} and line["peak_gpu_gb"] is None
    with pytest.raises(ZeroDivisionError), Run(recipe):
        _ = 1 / 0
    after = json.loads((recipe.folder / "summary.json").read_text())
    assert after["status"] == "failed" and after["last_released"] == made.path.name and after["stages"] == []
    assert {EXIT_CODES[status] for status in ("refused", "anomalous")} == {3} and EXIT_CODES["inconclusive"] == 4


def test_two_runs_cannot_have_one_folder(fake_root: Path) -> None:
    recipe = load(["recipe=small.yaml"])
    with Run(recipe):
        before = os.listdir(recipe.folder)
        with pytest.raises(RunError, match=f"runs/small is in use by process {os.getpid()}; wait for it"), Run(recipe):
            pass
        assert os.listdir(recipe.folder) == before  # the second one wrote no summary
    with Run(recipe):
        pass


# Keys


def test_fingerprints_are_remembered_by_path_size_and_time(fake_root: Path) -> None:
    path, memory = fake_root / "weights.bin", fake_root / "runs" / ".fingerprints.json"
    path.write_bytes(b"old")
    os.utime(path, (1e9, 1e9))
    first = manifest.Fingerprints(memory).of(path)
    assert manifest.Fingerprints(memory).remembered(path) == first == manifest.hash_file(path)
    path.write_bytes(b"new")
    assert manifest.Fingerprints(memory).remembered(path) is None
    assert manifest.Fingerprints(memory).of(path) == manifest.hash_file(path) != first
    # written this moment: it may change again within the same time stamp, so it is not remembered
    assert manifest.Fingerprints(memory).remembered(path) is None


@pytest.mark.parametrize("reset", [True, False])
def test_peak_memory_is_that_of_the_stage(reset: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not reset:
        real = Path.write_text

        def refuse(self: Path, *args: Any, **kwargs: Any) -> int:
            if self.name == "clear_refs":
                raise PermissionError(self)
            return real(self, *args, **kwargs)

        monkeypatch.setattr(Path, "write_text", refuse)
    big = bytearray(os.urandom(1)) * (300 * 2**20)
    del big
    with Peak() as small:
        time.sleep(0.1)
    with Peak() as large:
        big = bytearray(b"x") * (300 * 2**20)
        time.sleep(0.1)
        del big
    assert large.rss_gb - small.rss_gb == pytest.approx(300 / 1024, abs=0.03)
    assert large.seconds >= 0.1


def test_secrets_are_struck_out() -> None:
    assert manifest.redact("hf_AbCdEfGh1234 at https://me:pass@host/x") == "hf_*** at https://me:***@host/x"
    assert manifest.redact("calibrate/hf_x and tcp://host:123") == "calibrate/hf_x and tcp://host:123"


# Several ranks, as processes


def test_a_terminated_run_says_so_in_its_summary(fake_root: Path) -> None:
    code = textwrap.dedent(
        """
        import time
        from pathlib import Path
        from qat import plugins
        plugins.ROOT = Path.cwd()
        from qat.recipe import load
        from qat.stages import Run
        def work(partial):
            print("at work", flush=True)
            time.sleep(60)
        with Run(load(["recipe=small.yaml"])) as run:
            run.stage("train", content={}, work=work)
        """
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    while "at work" not in process.stdout.readline():
        pass
    process.terminate()
    assert process.wait(timeout=30) == 128 + signal.SIGTERM
    summary = json.loads(Path("runs/small/summary.json").read_text())
    assert summary["status"] == "failed" and summary["error"] == "interrupted"


def test_nothing_that_a_pipeline_shows_is_of_an_earlier_run(fake_root: Path) -> None:
    """While a run goes on, when it failed, when its recipe is bad, and when it judged nothing."""
    recipe, folder = load(["recipe=small.yaml"]), Path("runs/small")
    earlier = ("verdict.json", "report.html", "report.json", "summary.md", "junit.xml")

    def plant() -> None:
        for name in earlier:
            (folder / name).write_text("released")

    def said() -> tuple[str, str]:
        """(Heading and text of summary.md, what the one test case is.)"""
        suites = ElementTree.parse(folder / "junit.xml").getroot()
        (case,) = suites.iter("testcase")
        assert suites.get("errors") == str(len(list(suites.iter("error"))))
        return (folder / "summary.md").read_text(), case[0].tag

    folder.mkdir(parents=True)
    plant()
    with pytest.raises(ValueError, match="two"), Run(recipe):
        assert said() == ("## ❌ small: failed\n\n" + UNFINISHED + "\n", "error")
        assert not any((folder / name).exists() for name in earlier[:3])
        plant()
        raise ValueError("one\n\x00<two>")
    assert said() == ("## ❌ small: failed\n\nValueError: one \x00\\<two\\>\n", "error")
    assert not any((folder / name).exists() for name in earlier[:3])
    plant()
    disown(["recipe=small.yaml", "train.steps=x"], "train.steps: x is no number")
    assert said() == ("## ❌ small: failed\n\ntrain.steps: x is no number\n", "error")
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["verdict"], summary["report"], summary["exports"]) == ("failed", None, None, {})
    two_stages(recipe, [])
    heading, kind = said()
    assert heading.startswith("## ❔ small: ungated\n\n") and kind == "skipped"
