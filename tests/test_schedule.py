"""`train` as a list: each stage goes on from what the last one left, and is a stage of the run by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qat import plan, results, sizes, training
from qat.artifact import Artifact
from qat.plugins import ROOT
from qat.recipe import Recipe, RecipeError, load
from qat.sections import Train
from qat.tokens import Corpus
from qat.train import main
from tests.artifacts import ALL
from tests.bench import LENGTH, RATES, Bench

SIZE = "batch: 2, length: 32"
BOTH = f"train=[{{learn: {{scale: 3e-3}}, steps: 3, {SIZE}}}, {{learn: {{bias: 3e-3}}, steps: 2, {SIZE}}}]"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


def train(bench: Bench, start: Path, out: Path, learn: Any, **more: Any) -> dict[str, Any]:
    out.mkdir()
    asked = Train(**{"learn": learn, "steps": 3, "batch": 4, "length": LENGTH} | more)
    corpus = Corpus(bench.windows, "print", "text.txt")
    return training.run(bench.parent, start, corpus, asked, ALL, out, torch.device("cpu"), torch.float32)


def parts(artifact: Artifact, kind: str) -> dict[str, torch.Tensor]:
    return {name: artifact.raw(name) for name in artifact.stored() if name.endswith(kind)}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("first", "second"), [
    ({"scale": 3e-3}, {"bias": 3e-3}), ({"bias": 3e-3}, {"scale": 3e-3}), (RATES, RATES),
    (RATES, {"gain": 1e-3}), ({"norm": 1e-3, "round": 1e-3}, {"bias": 3e-3}),
])  # fmt: skip
def test_a_second_stage_starts_where_the_first_ended(
    bench: Bench, tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    one = train(bench, bench.start, tmp_path / "one", first)
    two = train(bench, tmp_path / "one", tmp_path / "two", second)
    assert two["kl_start"] == one["kl_end"] and two["kl_end"] < two["kl_start"] < one["kl_start"]
    before, after = Artifact(tmp_path / "one"), Artifact(tmp_path / "two")
    moved = {"gain": {".scale"}, "round": {".codes"}, "bias": {".bias"}, "scale": {".scale"}, "norm": {"norm.weight"}}
    changed = set[str]().union(*(moved[kind] for kind in second))
    for kind in (".scale", ".bias", ".codes", "norm.weight"):
        assert same(parts(before, kind), parts(after, kind)) == (kind not in changed), kind
    said = json.loads((tmp_path / "two" / "artifact.json").read_text())["train"]
    assert said["learned"] == sorted(second) and said["after"]["learned"] == sorted(first)


def test_a_stage_with_nothing_to_recover_hands_on_what_it_got(bench: Bench, tmp_path: Path) -> None:
    train(bench, bench.start, tmp_path / "one", RATES)
    metrics = train(bench, tmp_path / "one", tmp_path / "two", {"bias": {"start": "mean"}, "scale": {}}, enough=1e3)
    assert metrics["ended"] == "nothing to recover"
    kl = f"{metrics['kl_start']:.5f}"
    said = f"0 steps; KL on held-out windows of the training text from {kl} to {kl}; ended early: nothing to recover"
    assert results.trained(metrics) == said
    assert "likeliest tokens, which leave out 12.50% of its" in results.trained(metrics | {"teacher_tail": 0.125})
    before, after = Artifact(tmp_path / "one"), Artifact(tmp_path / "two")
    assert same(parts(before, ""), parts(after, ""))


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def made(folder: Path) -> dict[str, bool]:
    """Whether each stage was reused, by name."""
    return {stage["name"]: stage["reused"] for stage in json.loads((folder / "summary.json").read_text())["stages"]}


def test_every_stage_is_cached_and_measured(tmp_path: Path) -> None:
    plain = ["recipe=micro.yaml", f"output={tmp_path}", "data.training.max_mb=0.02", "data.calibration.max_mb=0.02"]
    arguments = [*plain, BOTH.replace("{bias: 3e-3}", "{bias: 3e-3}, loss: {kl: 1, ce: 0.01}")]
    assert main(arguments) == 0
    run = tmp_path / "micro"
    assert list(made(run)) == ["calibrate", "train-1", "train-2", "export", "gate", "release"]
    rows = {row["state"]: row for row in json.loads((run / "verdict.json").read_text())["table"]}
    assert list(rows) == ["parent", "rtn", "calibrate", "train-1", "train-2", "compressed_tensors"]
    assert rows["rtn"]["kl"] > rows["train-1"]["kl"] > rows["train-2"]["kl"]
    assert rows["train-2"]["kl"] == pytest.approx(rows["compressed_tensors"]["kl"], rel=1e-6)
    report = json.loads((run / "report.json").read_text())
    assert {name: len(losses) for name, losses in report["training"].items()} == {"train-1": 3, "train-2": 2}
    facts = dict(report["facts"])
    assert facts["train-1"].startswith("3 steps; KL on held-out windows of the training text from ")
    assert f"to {facts['train-2'].split('from ')[1].split(' to ')[0]};" in facts["train-1"]  # where the next one starts
    card = next(run.glob("release-*/compressed_tensors/README.md")).read_text()
    steps = "steps of 2 x 32 tokens by the KL to the parent's logits"
    assert f"; scale trained for 3 {steps}; then bias trained for 2 {steps} and the cross-entropy of the next" in card

    assert main([*arguments, "until=train", "train.1.steps=4"]) == 0
    assert made(run) == {"calibrate": True, "train-1": True, "train-2": False}
    assert main([*arguments, "until=train", "fresh=train"]) == 0
    assert made(run) == {"calibrate": True, "train-1": False, "train-2": False}
    rows = {row.step.label: row.state for row in plan.make(load([*arguments, "train.0.steps=4"])).rows}
    assert rows == {
        "calibrate": "reused", "train-1": "run", "train-2": "run", "export/compressed_tensors": "run", "gate": "run"
    }  # fmt: skip
    assert main([*plain, "until=train"]) == 0
    assert list(made(run)) == ["calibrate", "train"]  # one stage has no number


def test_needs_of_each_stage_are_its_own() -> None:
    rows = {row.step.label: row for row in plan.make(load(["recipe=demo.yaml", "variants={}", BOTH])).rows}
    first, second = rows["train-1"].needs, rows["train-2"].needs
    assert first and second and first.seconds > second.seconds


@pytest.mark.parametrize(("teacher", "bytes_a_token"), [("hidden", 256 * 4), (64, 6 * 64)])
def test_a_cached_teacher_needs_disk_for_each_token(tmp_path: Path, teacher: Any, bytes_a_token: int) -> None:
    """No less than a run writes, of which every token is another one."""
    asked = ["recipe=demo.yaml", "variants={}", "compute.dtype=float32", "train.steps=200", f"output={tmp_path}"]
    plain, cached, small = (
        plan.make(load([*asked, *more])).rows[1].needs
        for more in ([], [f"train.teacher={teacher}"], [f"train.teacher={teacher}", "data.training.max_mb=0.1"])
    )
    assert plain and cached and small
    more = (cached.disk_gb - plain.disk_gb) * plan.GB / (200 * 8 * 256 * bytes_a_token)
    assert 1 <= more < 1.2 and small.disk_gb - plain.disk_gb < (cached.disk_gb - plain.disk_gb) / 2


def test_a_packed_student_needs_less_memory() -> None:
    plain, packed = (
        plan.make(load(["recipe=demo.yaml", "variants={}", "compute.dtype=bfloat16", *more])).rows[1]
        for more in ([], ["train.student=packed"])
    )
    assert plain.needs and packed.needs and plain.key == packed.key, "the result is the same"
    weights = sizes.of_folder(ROOT / "recipes/demo/model").linear
    assert (plain.needs.memory_gb - packed.needs.memory_gb) * plan.GB == pytest.approx(weights * (3 - 0.5), rel=1e-6)


def test_learning_codes_needs_memory_for_each_weight() -> None:
    plain, codes = (
        plan.make(load(["recipe=demo.yaml", "variants={}", f"train.learn={kind}"])).rows[1].needs
        for kind in ("scale", "round")
    )
    weights = sizes.of_folder(ROOT / "recipes/demo/model").linear
    assert plain and codes and (codes.memory_gb - plain.memory_gb) * plan.GB >= 33 * weights
    assert codes.disk_gb * plan.GB > 16 * weights  # the codes and two moments, and the best so far


def test_a_list_of_stages_in_a_recipe() -> None:
    recipe = load(["recipe=micro.yaml", BOTH, "train.1.learn.bias={start: mean}"])
    assert [list(one.learn) for one in recipe.trainings] == [["scale"], ["bias"]]
    assert recipe.trainings[1].model_dump()["learn"]["bias"]["start"] == "mean"
    assert Recipe.model_validate(recipe.model_dump()) == recipe
    overlaid = load(["recipe=micro.yaml", BOTH, "variants={a: {}, b: {train: {steps: 5}}}"])
    assert [len(one.trainings) for _, one in overlaid.by_variant] == [2, 1]


@pytest.mark.parametrize(("override", "line"), [
    ("train.1.stepps=3", "train.1.stepps: unknown key, did you mean 'steps'?"),
    ("train.0.learn.zero=1e-3", "train.0.learn.zero: symmetric int4 has no zero points; set train.0.learn.zero"),
    ("train.2.steps=3", "train.2.steps: train is a list; its items are train.0 to train.1"),
    ("train.steps=3", "train.steps: train is a list; its items are train.0 to train.1"),
    ("train.0.learn.scale.x=1", "has no keys; give it whole: train.0.learn.scale='{rate: 0.003, x: 1}'"),
    ("train=[]", "train: an empty list trains nothing; give at least one stage, or null"),
    ("train=[3]", "train.0: "),
])  # fmt: skip
def test_mistakes_in_a_list_of_stages_have_their_place(override: str, line: str) -> None:
    with pytest.raises(RecipeError) as error:
        load(["recipe=micro.yaml", BOTH.replace("{bias: 3e-3}", "{bias: {rate: 3e-3}}"), override])
    assert line in str(error.value)


@pytest.mark.parametrize(("more", "how"), [
    ({}, ""),
    ({"seconds_per_step": 0.25, "ranks": 1}, "; 0.25 s a step"),
    ({"seconds_per_step": 0.25, "ranks": 2, "sharded": True}, "; 0.25 s a step (2 processes, weights split over them)"),
    ({"seconds_per_step": 2, "cuda_graph": True, "compiled": True}, "; 2 s a step (CUDA graph, compiled)"),
])  # fmt: skip
def test_the_report_says_how_steps_were_computed(more: dict[str, Any], how: str) -> None:
    said = results.trained({"loss": [1.0, 0.5], "kl_start": 0.2, "kl_end": 0.1, "ended": None, **more})
    assert said == "2 steps; KL on held-out windows of the training text from 0.20000 to 0.10000" + how
