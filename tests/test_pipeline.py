"""The whole command on the random `micro` model: what it leaves behind, what it reuses, how it says no."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

import gate.stage
from qat import training
from qat.plugins import ROOT
from qat.train import main

FP8 = {"train": None, "calibrate": {"range": "max"}}
CHANNEL = {"weights": {"dtype": "fp8_e4m3"}, "inputs": {"dtype": "fp8_e4m3", "per": "token", "dynamic": True}}
STATIC = {"weights": {"dtype": "fp8_e4m3", "per": "tensor"}, "inputs": {"dtype": "fp8_e4m3", "per": "tensor"}}
VARIANTS = {
    "int4": {"export": {"formats": ["awq", "compressed_tensors"]}},
    "fp8": {**FP8, "scheme": CHANNEL, "export": {"formats": ["compressed_tensors"]}},
    "fp8_static": {
        **FP8,
        "scheme": STATIC,
        "export": {"formats": ["modelopt"], "engines": ["vllm", "trtllm", "trtllm_legacy"]},
    },
}


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # the texts of recipes/micro.yaml are relative to it


def micro(output: Path, *more: str) -> tuple[int, Path]:
    """Run recipes/micro.yaml; gives the exit code and the folder of the run."""
    return main(["recipe=micro.yaml", f"output={output}", *more]), output / "micro"


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def stage_files(folder: Path) -> dict[str, bytes]:
    """The bytes of every file of a finished stage."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if "/" in name and not name.startswith(".")}


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one undisturbed run; not to be changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        code, folder = micro(tmp_path_factory.mktemp("released"))
    assert code == 0
    return folder


@pytest.fixture
def unreleased(released: Path, tmp_path: Path) -> Path:
    """The output folder of a run like `released` that is finished up to the gate."""
    shutil.copytree(
        released, tmp_path / "micro", ignore=shutil.ignore_patterns("release-*", "summary.json", "verdict.json")
    )
    return tmp_path


def relative_paths(value: Any) -> list[str]:
    """Everything that is called a path, a verdict or a release, however deep."""
    found = []
    for key, inner in value.items() if isinstance(value, dict) else ((None, v) for v in value):
        if key in ("path", "verdict", "report", "last_released"):
            found += [inner] if inner is not None else []
        elif isinstance(inner, dict | list):
            found += relative_paths(inner)
    return found


def test_the_summary_says_what_was_made_and_where(released: Path) -> None:
    summary = summary_of(released)
    assert list(summary) == ["status", "exports", "verdict", "report", "last_released", "stages"]
    assert summary["status"] == "released"
    assert list(summary["exports"]) == ["compressed_tensors"]
    export = summary["exports"]["compressed_tensors"]
    assert set(export) == {"path", "format", "scheme", "engines", "released"}
    assert (export["format"], export["engines"], export["released"]) == ("compressed_tensors", ["vllm"], True)
    assert export["path"].startswith(summary["last_released"] + "/")
    assert [stage["name"] for stage in summary["stages"]] == ["calibrate", "train", "export", "gate", "release"]
    wanted = {"name", "key", "path", "reused", "seconds", "peak_rss_gb", "peak_gpu_gb", "metrics"}
    for stage in summary["stages"]:
        assert wanted <= set(stage) and stage["path"] == f"{stage['name']}-{stage['key']}"
        assert stage["reused"] is False and stage["seconds"] >= 0 and stage["peak_rss_gb"] > 0
    paths = relative_paths(summary)
    assert len(paths) == 9 and summary["report"] == "report.html"
    for path in paths:
        assert not Path(path).is_absolute() and (released / path).exists(), path


def test_the_verdict_and_the_table_have_every_state(released: Path) -> None:
    verdict = json.loads((released / "verdict.json").read_text())
    assert verdict["status"] == "released"
    states = {row["state"]: row for row in verdict["table"]}
    assert set(states) == {"parent", "rtn", "calibrate", "train", "compressed_tensors"}
    # what was trained is what the exported directory computes, and three steps helped
    assert states["compressed_tensors"]["kl"] == pytest.approx(states["train"]["kl"], rel=1e-6)
    assert states["parent"]["kl"] == 0 < states["train"]["kl"] < states["rtn"]["kl"]


def test_what_is_released_is_complete_and_says_nothing_of_this_machine(released: Path) -> None:
    folder = released / summary_of(released)["exports"]["compressed_tensors"]["path"]
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors", "README.md"} <= set(files)
    exported = next(released.glob("export-*/compressed_tensors"))
    for path in exported.iterdir():
        assert files[path.name].stat().st_ino == path.stat().st_ino, path.name  # linked, not copied
    for name, path in files.items():
        assert str(released).encode() not in path.read_bytes(), name


def test_the_same_command_again_reuses_every_stage(
    released: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(released, tmp_path / "micro")
    before = stage_files(tmp_path / "micro")
    code, folder = micro(tmp_path)
    summary = summary_of(folder)
    assert code == 0 and [stage["reused"] for stage in summary["stages"]] == [True] * 5
    assert {**summary, "stages": None} == {**summary_of(released), "stages": None}
    assert stage_files(folder) == before
    said = capsys.readouterr().out
    assert all(f"{stage['path']}: reused" in said for stage in summary["stages"])


def test_two_runs_in_two_places_give_the_same_bytes(released: Path, tmp_path: Path) -> None:
    _, folder = micro(tmp_path, "until=export")
    ours, theirs = stage_files(folder), stage_files(released)
    names = [name for name in ours if not name.endswith(("manifest.json", "seconds.csv"))]
    assert len(names) > 15 and summary_of(folder)["status"] == "ungated"
    assert [name for name in names if ours[name] != theirs[name]] == []


def expanded(folder: Path) -> dict[str, Tensor]:
    """Dequantized weights of an fp8 directory, straight from its file."""
    tensors = load_file(folder / "model.safetensors")
    scales = {n.removesuffix("_scale"): t for n, t in tensors.items() if n.endswith("weight_scale")}
    return {n: tensors[n].float() * scale.float() for n, scale in scales.items()}


def test_int4_and_fp8_in_one_command(tmp_path: Path, released: Path) -> None:
    recipe = yaml.safe_load((ROOT / "recipes/micro.yaml").read_text())
    (tmp_path / "three.yaml").write_text(yaml.safe_dump({**recipe, "variants": VARIANTS}))
    assert main([f"recipe={tmp_path / 'three.yaml'}", f"output={tmp_path}"]) == 0
    summary = summary_of(tmp_path / "three")
    assert set(summary["exports"]) == {
        "int4/awq", "int4/compressed_tensors", "fp8/compressed_tensors", "fp8_static/modelopt"
    }  # fmt: skip
    paths = {name: tmp_path / "three" / export["path"] for name, export in summary["exports"].items()}
    assert all(export["released"] and paths[name].is_dir() for name, export in summary["exports"].items())
    made = [(stage["name"], stage["variant"]) for stage in summary["stages"]]
    assert [variant for name, variant in made if name == "train"] == ["int4"] and made[-2:] == [
        ("gate", None), ("release", None)
    ]  # fmt: skip
    # the int4 variant is the plain micro run, whatever stands beside it
    alone = next(released.glob("export-*/compressed_tensors/model.safetensors"))
    assert (paths["int4/compressed_tensors"] / "model.safetensors").read_bytes() == alone.read_bytes()
    parent = load_file(tmp_path / ".parents/micro/model.safetensors")

    def rounded_once(made: Tensor, weight: Tensor, scale: Tensor) -> bool:
        """Within half a step of E4M3: 3 bits after the leading one, and 2^-9 below 2^-6."""
        return bool(((made - weight).abs() <= weight.abs() * 2**-4 + scale * 2**-10).all())

    channel, static = expanded(paths["fp8/compressed_tensors"]), expanded(paths["fp8_static/modelopt"])
    assert len(channel) == len(static) == 14
    for name, made in channel.items():
        weight = parent[name].float()
        assert rounded_once(made, weight, weight.abs().amax(-1, keepdim=True) / 448), name
        assert rounded_once(static[name], weight, weight.abs().max() / 200), name
        # rounding to int4 first would have been seen
        groups = weight.view(len(weight), -1, 32)
        scale = groups.abs().amax(-1, keepdim=True) / 7.5
        int4 = ((groups / scale).round().clamp(-8, 7) * scale).view(weight.shape)
        assert not rounded_once(int4, weight, weight.abs().amax(-1, keepdim=True) / 448), name
    assert (paths["fp8_static/modelopt"] / "trtllm_checkpoint/rank0.safetensors").is_file()
    inputs = load_file(paths["fp8_static/modelopt"] / "model.safetensors")
    for index in range(2):
        for leaves in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            for part in ("weight_scale", "input_scale"):
                shared = {inputs[f"model.layers.{index}.{leaf}.{part}"].item() for leaf in leaves}
                assert len(shared) == 1 and shared.pop() > 0, (leaves, part)


def test_a_missed_threshold_refuses_and_a_looser_one_releases_without_measuring(
    unreleased: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure_all(*_: Any, **__: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(gate.stage, "measure_all", measure_all)
    code, folder = micro(unreleased, "gate.divergence.max_kl=0.000001")
    summary = summary_of(folder)
    assert code == 3 and summary["status"] == "refused" and summary["last_released"] is None
    assert list(folder.glob("release-*")) == []
    assert [export["released"] for export in summary["exports"].values()] == [False]
    assert json.loads((folder / summary["verdict"]).read_text())["status"] == "refused"
    assert "refused compressed_tensors: KL to the parent" in capsys.readouterr().out
    code, folder = micro(unreleased, "gate.divergence.max_kl=100")
    summary = summary_of(folder)
    assert code == 0 and summary["status"] == "released"
    assert [stage["reused"] for stage in summary["stages"]] == [True] * 4 + [False]
    first = summary["last_released"]
    # a later refusal leaves the earlier release standing, and says where it is
    code, folder = micro(unreleased, "gate.perplexity.max_relative_increase=0", "gate.divergence.min_top1=1")
    assert code == 3 and summary_of(folder)["last_released"] == first and (folder / first).is_dir()


def test_a_wrong_recipe_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = micro(tmp_path / "runs", "train.stepz=3", "scheme.weights.group_size=-1")
    said = capsys.readouterr()
    assert code == 2 and said.out == "" and list(tmp_path.iterdir()) == []
    assert said.err.count("train.stepz") == 1 and "did you mean 'steps'?" in said.err
    assert "scheme.weights.group_size" in said.err and "Traceback" not in said.err


def test_only_the_first_rank_of_a_machine_complains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert micro(tmp_path / "runs", "train.stepz=3")[0] == 2
    assert capsys.readouterr() == ("", "")


def test_training_that_goes_wrong_is_a_failure_of_the_run(tmp_path: Path, unreleased: Path) -> None:
    code, folder = micro(unreleased, "train.learn.bias=300", "train.learn.scale=null")
    summary = summary_of(folder)
    assert code == 1 and summary["status"] == "failed" and "made the model worse" in summary["error"]
    assert [stage["name"] for stage in summary["stages"]] == ["calibrate"] and list(folder.glob("release-*")) == []
    assert torch.is_grad_enabled()


def test_trackers_of_a_stage_that_is_reused_are_said_to_hear_nothing(
    unreleased: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "get_available_trackers", lambda: ["tensorboard"])
    for trackers, said in (("tensorboard", True), ("[]", False)):
        code, _ = micro(unreleased, f"train.trackers={trackers}", "until=train")
        assert code == 0 and ("reused, so tensorboard is told nothing" in capsys.readouterr().out) == said
