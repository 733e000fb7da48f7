"""The training loop: its loss and optimizer against slow ones, resume to the bit, and errors that stop it."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor

from qat import loop, resume, training
from qat.artifact import Artifact, block_file, block_tensors, save_tensors
from qat.checkpoint import SafetensorsFolder
from qat.losses import kl
from qat.micro import make_micro
from qat.model import Model
from qat.parent import Parent
from qat.quant import Quantized, grouped, max_scale, quantize, scale_to_grid
from qat.sections import Train
from qat.student import Student, run_blocks
from qat.teacher import Resident
from qat.tokens import Corpus, batches
from tests.artifacts import ALL, make

LENGTH, RATES = 16, {"bias": 3e-3, "scale": 3e-3}
DEFAULTS: dict[str, Any] = {"loss": {"kl": 1.0}, "steps": 6, "batch": 4, "micro_batch": None, "warmup": 2,
                            "temperature": 1.0, "seed": 5, "save_every": 1}  # fmt: skip


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours catches it."""


class Bench:
    """A random teacher and its rounding to nearest, with scales a tenth too large: there is much to learn."""

    def __init__(self, root: Path) -> None:
        self.parent = Parent(make_micro(root / "micro"), "micro")
        self.start = root / "start"
        artifact, tensors = make(self.start, self.parent.config), self.parent.tensors
        for index in range(2):
            path = self.start / block_file(index)
            stored = {name: tensors.get(name) for name in load_file(path) if name in tensors.names()}
            for name in (name for name in artifact.formats if name.startswith(f"model.layers.{index}.")):
                weight, fmt = tensors.get(f"{name}.weight").float(), artifact.formats[name]
                scale = max_scale(grouped(weight, 32).abs().amax(-1), fmt)
                q = Quantized(quantize(weight, scale, None, fmt), scale_to_grid(scale * 1.1))
                stored |= block_tensors(name, q, None, None)
            save_tensors(stored, path)
        self.windows = torch.randint(257, (23, LENGTH), generator=torch.Generator().manual_seed(1))

    def pair(self, learn: Any = RATES) -> tuple[Model, Student]:
        teacher = Model(self.parent.config, SafetensorsFolder(self.parent.folder), resident=True)
        return teacher, Student(teacher, Artifact(self.start), Train(learn=learn).learn, ALL)

    def train(self, folder: Path, accelerator: Any = None, **changes: Any) -> tuple[Student, dict[str, Any]]:
        folder.mkdir(exist_ok=True)
        teacher, student = self.pair(changes.pop("rates", RATES))
        accelerator = accelerator or Accelerator(cpu=True, mixed_precision="no")
        history = loop.train(accelerator, Resident(teacher), student, self.windows, folder, **DEFAULTS | changes)
        return student, history


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"))


@settings(max_examples=20, deadline=None)
@given(tokens=st.integers(1, 4), vocabulary=st.integers(2, 6), t=st.sampled_from([0.5, 1, 4]), seed=st.integers(0, 9))
def test_kl_is_the_sum_over_the_vocabulary(tokens: int, vocabulary: int, t: float, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    teacher, student = torch.randn(2, 1, tokens, vocabulary, generator=random) * 3
    total = 0.0
    for ours, theirs in zip(teacher[0].tolist(), student[0].tolist(), strict=True):
        p, q = ([math.exp(v / t) for v in row] for row in (ours, theirs))
        total += sum(a / sum(p) * math.log(a / sum(p) / (b / sum(q))) for a, b in zip(p, q, strict=True))
    assert kl(teacher, student, t).item() == pytest.approx(total * t**2, rel=1e-4, abs=1e-5)
    assert kl(teacher, teacher, t).item() == pytest.approx(0, abs=1e-6)


@given(steps=st.integers(1, 300), data=st.data())
def test_the_rate_rises_to_one_and_falls_to_nothing(steps: int, data: st.DataObject) -> None:
    warmup = data.draw(st.integers(0, steps - 1))
    rates = [loop.learning_rate(step, steps, warmup) for step in range(steps)]
    assert all(0 < rate <= 1 for rate in rates) and max(rates) == 1
    assert rates[:warmup] == sorted(rates[:warmup]) and rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert rates[warmup] == 1
    assert loop.learning_rate(steps, steps, warmup) == pytest.approx(0, abs=1e-12)


@given(count=st.integers(2, 100))
def test_validation_windows_are_never_trained_on(count: int) -> None:
    kept, held = loop.split_validation(torch.arange(count)[:, None])
    assert torch.equal(torch.cat([kept, held]).flatten(), torch.arange(count))
    assert 1 <= len(held) <= min(8, max(1, count // 4))


def test_one_window_is_too_few() -> None:
    with pytest.raises(ValueError, match=r"data\.training has one window only.*give more text"):
        loop.split_validation(torch.zeros(1, 4))


def test_training_is_adamw_by_hand(bench: Bench, tmp_path: Path) -> None:
    """Whole-batch autograd through both models and the published AdamW recurrence, with the rates of the schedule."""
    student, history = bench.train(tmp_path, micro_batch=1)
    teacher, slow = bench.pair()
    kept, held = bench.windows[:-5], bench.windows[-5:]
    slow.begin(kept[:8])
    first = {kind: torch.zeros_like(p) for kind, p in slow.delta.items()}
    second = {kind: torch.zeros_like(p) for kind, p in slow.delta.items()}

    def loss(windows: Tensor) -> Tensor:
        with torch.no_grad():
            goal = teacher.logits(run_blocks(teacher, windows))
        return kl(goal, slow.logits(run_blocks(slow, windows))) / windows.numel()

    with teacher.ends():
        assert history["validation_start"] == pytest.approx(loss(held).item(), rel=1e-4)
        for step in range(6):
            value = loss(batches(kept, 4, 5, step))
            slow.zero_grad()
            value.backward()
            slow.pull()
            assert history["loss"][step] == pytest.approx(value.item(), rel=1e-4)
            rate = 3e-3 * ((step + 1) / 2 if step < 2 else 0.5 * (1 + math.cos(math.pi * (step - 2) / 4)))
            for kind, p in slow.delta.items():
                first[kind] = 0.9 * first[kind] + 0.1 * p.grad
                second[kind] = 0.95 * second[kind] + 0.05 * p.grad**2
                mean, square = first[kind] / (1 - 0.9 ** (step + 1)), second[kind] / (1 - 0.95 ** (step + 1))
                p.data -= rate * mean / (square.sqrt() + 1e-8)
            slow.refresh()
        assert history["validation_end"] == pytest.approx(loss(held).item(), rel=1e-3)
    assert history["validation_end"] < history["validation_start"]
    for kind, p in slow.delta.items():
        # where a gradient is next to nothing its sign, and so Adam's step, is a matter of the order of sums
        assert p.abs().max() > 3e-3 and (student.delta[kind] - p).abs().quantile(0.99) < 1e-4, kind


@pytest.mark.parametrize("micro_batch", [1, 3, 100])
def test_micro_batches_do_not_change_the_gradient(bench: Bench, tmp_path: Path, micro_batch: int) -> None:
    one = bench.train(tmp_path / "a", micro_batch=micro_batch, steps=1, warmup=0)[1]
    whole = bench.train(tmp_path / "b", steps=1, warmup=0)[1]
    for key in ("validation_start", "validation_end"):
        assert one[key] == pytest.approx(whole[key], rel=1e-4)
    assert one["loss"] == pytest.approx(whole["loss"], rel=1e-5)


def test_training_ends_when_there_is_nothing_left_to_recover(bench: Bench, tmp_path: Path) -> None:
    start = bench.train(tmp_path / "a", steps=1, warmup=0)[1]["validation_start"]
    student, history = bench.train(tmp_path / "b", enough=start * 1.001)
    assert history["loss"] == [] and history["ended"] == "nothing to recover"
    assert history["validation_end"] == pytest.approx(start)
    assert all(p.abs().sum() == 0 for p in student.delta.values())
    history = bench.train(tmp_path / "c", enough=start * 0.95, validate_every=1, steps=20)[1]
    assert 0 < len(history["loss"]) < 20 and "at most train.enough" in history["ended"]
    assert history["validation"][-1][1] <= start * 0.95 < history["validation"][-2][1]


def test_the_best_validated_deltas_are_kept(bench: Bench, tmp_path: Path) -> None:
    wild = {"rates": {"bias": 0.3, "scale": 0.05}, "steps": 12, "warmup": 0}
    history = bench.train(tmp_path / "a", **wild, validate_every=2)[1]
    steps, values = zip(*history["validation"], strict=True)
    assert steps == (2, 4, 6, 8, 10, 12) and history["ended"] is None
    assert history["validation_end"] == pytest.approx(min(values), rel=1e-5)
    stopped = bench.train(tmp_path / "b", **wild, validate_every=1, patience=1)[1]
    if stopped["ended"]:
        values = [value for _, value in stopped["validation"]]
        assert values[-1] >= values[-2] == min(values) == pytest.approx(stopped["validation_end"], rel=1e-5)


def same(a: tuple[Student, dict[str, Any]], b: tuple[Student, dict[str, Any]]) -> bool:
    return a[1] == b[1] and all(torch.equal(p, b[0].delta[kind]) for kind, p in a[0].delta.items())


def killed_after(steps: int) -> Callable[[int, float], None]:
    def progress(done: int, loss: float) -> None:
        if done > steps:
            raise Killed

    return progress


MIXES: dict[str, dict[str, Any]] = {
    "default": {},
    "every": {"rates": {"bias": {"rate": 3e-3, "start": "mean"}, "gain": 3e-3, "norm": 2e-3, "round": 0.05},
              "validate_every": 2},
}  # fmt: skip


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("save_every", [1, 2])
def test_six_steps_are_three_and_three_more(bench: Bench, tmp_path: Path, save_every: int, mix: str) -> None:
    undisturbed = bench.train(tmp_path / "a", **MIXES[mix])
    with pytest.raises(Killed):
        bench.train(tmp_path / "b", progress=killed_after(3), save_every=save_every, **MIXES[mix])
    done = []
    again = {"progress": lambda step, loss: done.append(step), "save_every": save_every}
    resumed = bench.train(tmp_path / "b", **again, **MIXES[mix])
    assert done == list(range(4 if save_every == 1 else 3, 7))
    assert same(undisturbed, resumed)
    resume.clear_state(tmp_path / "b")
    assert list((tmp_path / "b").iterdir()) == []


FILES = ("history.part", "tensors.part", "tensors", "history")


@pytest.mark.parametrize("save", [1, 3])
@pytest.mark.parametrize("after", FILES)
def test_a_kill_between_the_two_files_loses_at_most_a_save(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: int, after: str
) -> None:
    undisturbed = bench.train(tmp_path / "a")
    saves, folder = [], tmp_path / "b"
    real_save, real_replace, real_write = resume.save_tensors, Path.replace, Path.write_text

    def die(at: str) -> None:
        if len(saves) == save and at == after:
            raise Killed

    def write_text(path: Path, text: str, *args: Any, **more: Any) -> int:
        if path.name == "history.json.part":
            saves.append(path)
            if len(saves) == save and after == "history.part":
                real_write(path, text[: len(text) // 2])  # torn in the middle
                raise Killed
        return real_write(path, text, *args, **more)

    def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
        if len(saves) == save and after == "tensors.part":
            path.with_name(path.name + ".part").write_bytes(b"half")
            raise Killed
        real_save(tensors, path)
        die("tensors")

    def replace(path: Path, target: Any) -> Path:
        made = real_replace(path, target)
        if path.name == "history.json.part":
            die("history")
        return made

    with monkeypatch.context() as patch:
        patch.setattr(resume, "save_tensors", save_tensors)
        patch.setattr(Path, "replace", replace)
        patch.setattr(Path, "write_text", write_text)
        with pytest.raises(Killed):
            bench.train(folder)
    done = []
    resumed = bench.train(folder, progress=lambda step, loss: done.append(step))
    assert same(undisturbed, resumed)
    assert done[0] == (save + 1 if after in ("tensors", "history") else save)


def test_a_torn_pair_is_not_mixed(bench: Bench, tmp_path: Path) -> None:
    undisturbed = bench.train(tmp_path / "a")
    history = json.loads((tmp_path / "a" / "history.json").read_text())
    (tmp_path / "a" / "history.json").write_text(json.dumps({**history, "loss": history["loss"][:2]}))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert same(undisturbed, bench.train(tmp_path / "b"))


def test_a_loss_that_is_no_number_stops_training(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError, match=r"the loss is (nan|inf) at step 1; lower train\.learn's rates"):
        bench.train(tmp_path, rates={"bias": 1e30}, warmup=0, save_every=100)


@pytest.mark.parametrize(
    ("fake", "changes", "why"),
    [
        ({"num_processes": 3}, {}, r"train\.batch 4 does not split over 3 processes; use a multiple of 3"),
        ({"gradient_accumulation_steps": 2}, {}, r"the recipe owns it: use train\.micro_batch"),
    ],
)
def test_what_the_launcher_cannot_do(
    bench: Bench, tmp_path: Path, fake: dict[str, int], changes: dict[str, Any], why: str
) -> None:
    accelerator = SimpleNamespace(
        **{"num_processes": 1, "process_index": 0, "gradient_accumulation_steps": 1, "is_main_process": True} | fake
    )
    with pytest.raises(ValueError, match=why):
        bench.train(tmp_path, accelerator, **changes)


def run_stage(
    bench: Bench, out: Path, learn: dict[str, Any], slots: Any = ALL, steps: int = 4, **more: Any
) -> dict[str, Any]:
    corpus = Corpus(bench.windows, "print", "text.txt")
    train = Train(learn=learn, steps=steps, batch=4, length=LENGTH, **more)
    out.mkdir()
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


def test_without_a_slot_only_scales_are_learned(bench: Bench, tmp_path: Path) -> None:
    run_stage(bench, tmp_path / "out", RATES, slots=())
    assert json.loads((tmp_path / "out" / "artifact.json").read_text())["train"]["learned"] == ["scale"]
    with pytest.raises(ValueError, match="has only bias, but the engines load none"):
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


def test_nothing_to_recover_leaves_the_artifact_as_it_was(bench: Bench, tmp_path: Path) -> None:
    metrics = run_stage(bench, tmp_path / "out", RATES, enough=1e3)
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


@pytest.mark.parametrize(("keys", "path"), [
    ({"teacher": 64, "loss": {"kl": 1, "hidden": 1}}, "teacher"), ({"loss": "ce", "temperature": 2}, "temperature"),
    ({"patience": 2}, "patience"), ({"validate_every": 300}, "validate_every"), ({"loss": {"kl": 0}}, "loss.kl"),
    ({"loss": "mse"}, "loss.mse"), ({"teacher": 0}, "teacher.constrained-int"),
    ({"learn": {"bias": {"rat": 1}}}, "learn.bias.rat"),
])  # fmt: skip
def test_keys_without_effect_and_out_of_range(keys: dict[str, Any], path: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Train(**keys)
    assert path in {".".join(str(p) for p in e["loc"] if p != "[key]") for e in caught.value.errors()}
