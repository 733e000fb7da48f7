"""The train stage: the artifact and the numbers it leaves, and what it refuses."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, tracking
from accelerate.tracking import GeneralTracker
from accelerate.utils import LoggerType
from pydantic import ValidationError

from qat import loop, pipeline, report, resume, training
from qat.artifact import Artifact
from qat.job import Job
from qat.recipe import RecipeError, load
from qat.sections import Train
from qat.stages import Run
from qat.tokens import Corpus
from tests.artifacts import ALL
from tests.bench import LENGTH, RATES, Bench
from tests.test_compiled import needs_compiler


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


def run_stage(
    bench: Bench, out: Path, learn: dict[str, Any], slots: Any = ALL, steps: int = 4, **more: Any
) -> dict[str, Any]:
    corpus = Corpus(bench.windows, "print", "text.txt")
    train = Train(learn=learn, steps=steps, batch=4, length=LENGTH, **more)
    out.mkdir(exist_ok=True)
    return training.run(bench.parent, bench.start, corpus, train, slots, out, torch.device("cpu"), torch.float32)


def test_the_stage_leaves_an_artifact_and_its_numbers(bench: Bench, tmp_path: Path) -> None:
    metrics = run_stage(bench, tmp_path / "out", RATES)
    assert metrics["kl_end"] < metrics["kl_start"] and metrics["ranks"] == 1 and len(metrics["loss"]) == 4
    assert metrics["tokens"] == 4 * 4 * LENGTH
    before, after = Artifact(bench.start), Artifact(tmp_path / "out")
    added = set(after.stored()) - set(before.stored())
    assert added == {f"{name}.bias" for name in before.formats}
    changed = {name for name in before.stored() if not torch.equal(before.raw(name), after.raw(name))}
    assert changed == {f"{name}.scale" for name in before.formats}
    assert not any((tmp_path / "out" / name).exists() for name in (resume.RESUME, resume.HISTORY))


def test_only_the_linears_asked_for_get_a_bias(bench: Bench, tmp_path: Path) -> None:
    run_stage(bench, tmp_path / "out", {"bias": {"linears": ["*.o_proj", "mlp.*"]}})
    added = set(Artifact(tmp_path / "out").stored()) - set(Artifact(bench.start).stored())
    leaves = {"self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    assert added == {f"model.layers.{block}.{leaf}.bias" for block in range(2) for leaf in leaves}


def test_training_that_makes_it_worse_is_an_error_and_leaves_no_artifact(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"made the model worse: KL .* went from .*; lower the rates in train\.learn"):
        run_stage(bench, tmp_path / "out", {"bias": 300.0}, steps=2)
    assert not (tmp_path / "out" / "artifact.json").exists()


def test_a_result_that_is_no_number_is_worse(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = iter([0.1, math.nan])
    monkeypatch.setattr(loop, "evaluate", lambda *_: next(said))
    with pytest.raises(ValueError, match=r"went from 0\.1 to nan"):
        run_stage(bench, tmp_path / "out", RATES, steps=1)


def test_a_last_step_that_overflows_is_an_error(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises((ValueError, FloatingPointError)):
        run_stage(bench, tmp_path / "out", {"bias": 1e30}, steps=1)
    assert not (tmp_path / "out" / "artifact.json").exists()


def test_progress_counts_from_where_a_killed_training_goes_on(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the time left would be that of steps which took none of this sitting's."""
    shown, plain, log = [], report.Steps, Accelerator.log
    monkeypatch.setattr(report, "Steps", lambda *args, **more: shown.append(plain(*args, **more)) or shown[-1])

    def killed(self: Any, numbers: Any, step: int) -> None:
        if step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Accelerator, "log", killed)
    with pytest.raises(KeyboardInterrupt):
        run_stage(bench, tmp_path / "out", RATES, save_every=1)
    monkeypatch.setattr(Accelerator, "log", log)
    run_stage(bench, tmp_path / "out", RATES, save_every=1)
    assert [(steps.first, steps.done) for steps in shown] == [(0, 3), (2, 4)]


@pytest.mark.parametrize(("teacher", "windows"), [("resident", []), ("hidden", [16 + 5]), (9, [16, 5])])
def test_caching_the_teacher_is_progress_too(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, teacher: Any, windows: list[int]
) -> None:
    shown, plain = [], report.Steps
    monkeypatch.setattr(report, "Steps", lambda *args, **more: shown.append(plain(*args, **more)) or shown[-1])
    run_stage(bench, tmp_path / "out", RATES, teacher=teacher)
    assert [(s.what, s.done, s.total) for s in shown] == [*(("teacher", n, n) for n in windows), ("train", 4, 4)]


def test_without_a_slot_only_scales_are_learned(bench: Bench, tmp_path: Path) -> None:
    run_stage(bench, tmp_path / "out", RATES, slots=())
    assert json.loads((tmp_path / "out" / "artifact.json").read_text())["train"]["learned"] == ["scale"]
    with pytest.raises(ValueError, match=r"has only bias, but the engines of export\.engines load none"):
        run_stage(bench, tmp_path / "none", {"bias": 1e-3}, slots=())


def test_every_source_of_the_teacher_leaves_the_same_kind_of_artifact(bench: Bench, tmp_path: Path) -> None:
    resident = run_stage(bench, tmp_path / "resident", RATES)
    hidden = run_stage(bench, tmp_path / "hidden", RATES, teacher="hidden")
    top = run_stage(bench, tmp_path / "top", RATES, teacher=32)
    assert hidden["loss"] == pytest.approx(resident["loss"], rel=1e-4)
    assert hidden["kl_end"] == pytest.approx(resident["kl_end"], rel=1e-3)
    assert top["kl_start"] == pytest.approx(resident["kl_start"], rel=1e-4)  # validation is exact
    assert (
        all(a < b for a, b in zip(top["loss"][:1], resident["loss"][:1], strict=True)) and 0 < top["teacher_tail"] < 1
    )
    for name in ("resident", "hidden", "top"):
        files = {p.name for p in (tmp_path / name).iterdir()}
        assert "artifact.json" in files and not any(f.startswith(("teacher", "resume")) for f in files)


@pytest.mark.parametrize(
    "learn", [RATES, {"bias": {"start": "mean"}, "scale": 3e-3}, {"gain": 3e-3, "norm": 2e-3}, {"scale": 3e-3}]
)
def test_a_packed_student_leaves_the_same_bytes(bench: Bench, tmp_path: Path, learn: dict[str, Any]) -> None:
    plain = run_stage(bench, tmp_path / "plain", learn, checkpoint=1)
    packed = run_stage(bench, tmp_path / "packed", learn, checkpoint=1, student="packed")
    assert plain["loss"] == packed["loss"] and plain["kl_end"] == packed["kl_end"]
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "packed").iterdir())
    assert all((tmp_path / "plain" / file).read_bytes() == (tmp_path / "packed" / file).read_bytes() for file in files)


@pytest.mark.slow
@needs_compiler
def test_a_compiled_training_learns_the_same(bench: Bench, tmp_path: Path) -> None:
    plain = run_stage(bench, tmp_path / "plain", RATES, checkpoint=1)
    made = run_stage(bench, tmp_path / "compiled", RATES, checkpoint=1, compile=True, student="packed")
    assert (plain["compiled"], made["compiled"]) == (False, True)
    assert made["kl_start"] == plain["kl_start"]  # validation runs the plain blocks
    assert made["loss"] == pytest.approx(plain["loss"], rel=1e-4)
    assert made["kl_end"] == pytest.approx(plain["kl_end"], rel=1e-3)


@pytest.mark.parametrize("start", ["stored", "mean"])
def test_nothing_to_recover_leaves_the_artifact_as_it_was(bench: Bench, tmp_path: Path, start: str) -> None:
    plain = run_stage(bench, tmp_path / "plain", RATES, steps=1)
    metrics = run_stage(bench, tmp_path / "out", {"bias": {"start": start}}, enough=1e3)
    assert metrics["kl_start"] == metrics["kl_end"] == plain["kl_start"]  # that of the artifact, not of the start
    assert metrics["ended"] == "nothing to recover" and metrics["tokens"] == 0
    before, after = Artifact(bench.start), Artifact(tmp_path / "out")
    assert before.stored() == after.stored()
    assert all(torch.equal(before.raw(name), after.raw(name)) for name in before.stored())


@pytest.mark.parametrize(("more", "why"), [
    ({"cuda_graph": True}, "train.cuda_graph is true, but this run computes on cpu"),
    ({"teacher": 5000}, "train.teacher 5000 is more than the 257 tokens there are"),
])  # fmt: skip
def test_what_cannot_be_done_is_an_error(bench: Bench, tmp_path: Path, more: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        run_stage(bench, tmp_path / "out", RATES, **more)


def test_learned_norms_and_compile_are_no_recipe() -> None:
    with pytest.raises(RecipeError, match=r"train\.compile: is true, but learn has norm: set it to auto or false"):
        load(["recipe=micro.yaml", "train.learn={scale: {}, norm: {}}", "train.compile=true"])


@pytest.mark.parametrize(("key", "why"), [
    ("student=packed", "train.1.student is packed, but this launch splits weights over ranks"),
    ("compile=true", "train.1.compile is true, but weights that are split over ranks come and go"),
])  # fmt: skip
def test_what_split_weights_cannot_do_is_said_before_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, why: str
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    small = "learn: scale, steps: 3, length: 32, batch: 2"
    stages = f"train=[{{{small}}}, {{{small}, {key.replace('=', ': ')}}}]"
    recipe = load(["recipe=micro.yaml", f"output={tmp_path}", "compute.device=cpu", stages])
    with Run(recipe, rank=0, world_size=2) as folder:
        job = Job(folder, pipeline.task_texts)
        with pytest.raises(ValueError, match=re.escape(why)):
            pipeline.check(job)


@pytest.mark.parametrize(("overrides", "why"), [
    (["train.teacher=5000"], "train.teacher 5000 is more than the 257 tokens there are"),
    (["train.cuda_graph=true"], "train.cuda_graph is true, but this run computes on cpu"),
    (["train.checkpoint=3"], "train.checkpoint 3 is more than the 2 blocks there are"),
    (["train.learn={scale: {}, bias: {start: mean, skip_tokens: 32}}"],
     "train.learn.bias.skip_tokens 32 leaves nothing of windows of 32; take fewer"),
    (["train.batch=3"], "train.batch 3 does not split over 2 processes; use a multiple of 2"),
    (["train=[{learn: scale, steps: 3, length: 32, batch: 2}, {learn: bias, steps: 3, length: 32, batch: 2}]"],
     "train.1.learn has only bias, but the engines of export.engines load none; learn scale too, or set train.1 to"),
    (["variants={a: {train: {batch: 5}}}"], "variant a: train.batch 5 does not split over 2 processes"),
])  # fmt: skip
def test_what_training_cannot_do_is_said_before_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], why: str
) -> None:
    monkeypatch.setattr(pipeline, "trainable_biases", lambda *_: (frozenset(), "none"))
    recipe = load(["recipe=micro.yaml", f"output={tmp_path}", "compute.device=cpu", *overrides])
    with Run(recipe, rank=0, world_size=2) as folder:
        job = Job(folder, pipeline.task_texts)
        with pytest.raises(ValueError, match=re.escape(why)):
            pipeline.check(job)


def test_a_pattern_of_biases_that_matches_nothing_is_said_before_calibration(tmp_path: Path) -> None:
    recipe = load(["recipe=micro.yaml", f"output={tmp_path}", "train.learn={bias: {linears: [mlp.*, attn.*]}}"])
    with Run(recipe, rank=0, world_size=1) as folder:
        job = Job(folder, pipeline.task_texts)
        with pytest.raises(
            ValueError, match=r"train\.learn\.bias\.linears 'attn\.\*' matches none whose .*: mlp\.down"
        ):
            pipeline.check(job)


@pytest.mark.parametrize(("keys", "path"), [
    ({"teacher": 64, "loss": {"kl": 1, "hidden": 1}}, "teacher"), ({"loss": "ce", "temperature": 2}, "temperature"),
    ({"patience": 2}, "patience"), ({"validate_every": 300}, "validate_every"), ({"loss": {"kl": 0}}, "loss.kl"),
    ({"loss": "mse"}, "loss.mse"), ({"teacher": 0}, "teacher.constrained-int"),
    ({"learn": {"bias": {"rat": 1}}}, "learn.bias.rat"), ({"learn": ["bias", "round"], "student": "packed"}, "student"),
    ({"learn": "zero", "student": "packed"}, "student"),
])  # fmt: skip
def test_keys_without_effect_and_out_of_range(keys: dict[str, Any], path: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Train(**keys)
    assert path in {".".join(str(p) for p in e["loc"] if p != "[key]") for e in caught.value.errors()}


class Notebook(GeneralTracker):
    """A tracker that keeps what it is told; every one made is in `made`."""

    name, requires_logging_directory, made = "trackio", True, list[Any]()

    def __init__(self, run_name: str, logging_dir: str) -> None:
        super().__init__()
        self.run_name, self.logging_dir = run_name, Path(logging_dir)
        self.settings, self.lines, self.finished = dict[str, Any](), list[Any](), False
        self.made.append(self)

    @property
    def tracker(self) -> Any:
        return self

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.settings = values

    def log(self, values: dict[str, Any], step: int | None = None, **more: Any) -> None:
        self.lines.append((step, values))

    def finish(self) -> None:
        self.finished = True


def test_trackers_are_told_loss_and_kl(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "trackio", Notebook)
    monkeypatch.setattr(tracking, "_available_trackers", [LoggerType.TRACKIO])
    monkeypatch.setattr(Notebook, "made", [])
    out = tmp_path / "run" / "train-0123.partial"
    out.parent.mkdir()
    metrics = run_stage(bench, out, RATES, trackers="trackio", validate_every=2)
    (book,) = Notebook.made
    assert book.finished and book.run_name == "run" and book.logging_dir == out.parent / "trackers" / "train-0123"
    assert [values["loss"] for _, values in book.lines] == metrics["loss"]
    assert [[step, values["kl"]] for step, values in book.lines if "kl" in values] == metrics["validation"]
    assert [step for step, _ in book.lines] == [1, 2, 3, 4] and [s for s, _ in metrics["validation"]] == [2, 4]
    assert book.settings["learn.bias"] and all(isinstance(v, bool | int | float | str) for v in book.settings.values())
    plain = run_stage(bench, tmp_path / "plain", RATES, validate_every=2)
    assert plain["loss"] == metrics["loss"] and len(Notebook.made) == 1
    assert not (tmp_path / "trackers").exists()  # nothing by default


def test_a_tracker_that_is_not_installed_is_an_error(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "_available_trackers", [])
    with pytest.raises(ValueError, match=r"train\.trackers wandb is not installed: pip install wandb, or leave it out"):
        run_stage(bench, tmp_path / "out", RATES, trackers=["wandb"])
    with pytest.raises(ValidationError, match="trackers"):
        Train(trackers=["wanbd"])
