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
from safetensors.torch import load_file
from torch import Tensor

from qat import loop, training
from qat.artifact import Artifact, block_file, block_tensors, save_tensors
from qat.checkpoint import SafetensorsFolder
from qat.losses import kl
from qat.micro import make_micro
from qat.model import Model
from qat.parent import Parent
from qat.quant import Quantized, grouped, max_scale, quantize, scale_to_grid
from qat.sections import Train
from qat.student import Student, run_blocks
from qat.tokens import Corpus, batches
from tests.artifacts import ALL, make

LENGTH, RATES = 16, {"bias": 3e-3, "scale": 3e-3}
DEFAULTS: dict[str, Any] = {"rates": RATES, "steps": 6, "batch": 4, "micro_batch": None, "warmup": 2,
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
        return teacher, Student(teacher, Artifact(self.start), learn, ALL)

    def train(self, folder: Path, accelerator: Any = None, **changes: Any) -> tuple[Student, dict[str, Any]]:
        folder.mkdir(exist_ok=True)
        teacher, student = self.pair(changes.get("rates", RATES))
        accelerator = accelerator or Accelerator(cpu=True, mixed_precision="no")
        history = loop.train(accelerator, teacher, student, self.windows, folder, **DEFAULTS | changes)
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
    assert kl(teacher, student, t).item() == pytest.approx(total / tokens * t**2, rel=1e-4, abs=1e-6)
    assert kl(teacher, teacher, t).item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("tokens_in_a_chunk", [16, 23])
def test_the_loss_in_chunks_is_the_loss(bench: Bench, monkeypatch: pytest.MonkeyPatch, tokens_in_a_chunk: int) -> None:
    teacher, student = bench.pair()
    target, hidden = torch.randn(2, 3, LENGTH, 64, generator=torch.Generator().manual_seed(0))
    with teacher.ends():
        whole = hidden.clone().requires_grad_()
        expected = kl(teacher.logits(target), student.logits(whole), 2.0)
        expected.backward()
        monkeypatch.setitem(loop.LOGIT_BYTES, "cpu", 4 * 257 * 6 * tokens_in_a_chunk)
        calls, real = [], student.logits
        monkeypatch.setattr(student, "logits", lambda h: calls.append(len(h)) or real(h))
        pieces = hidden.clone().requires_grad_()
        loss = loop.head_loss(teacher, student, target, pieces * 1, 2.0, 3 * LENGTH)
    assert max(calls) == tokens_in_a_chunk and sum(calls) == 3 * LENGTH
    assert not loss.requires_grad and torch.allclose(loss, expected, rtol=1e-5)
    assert torch.allclose(pieces.grad, whole.grad, rtol=1e-4, atol=1e-8)


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
    slow.set_bias_unit(kept[:8])
    first = {kind: torch.zeros_like(p) for kind, p in slow.delta.items()}
    second = {kind: torch.zeros_like(p) for kind, p in slow.delta.items()}

    def loss(windows: Tensor) -> Tensor:
        with torch.no_grad():
            goal = teacher.logits(run_blocks(teacher, windows))
        return kl(goal, slow.logits(run_blocks(slow, windows)))

    with teacher.ends():
        assert history["validation_start"] == pytest.approx(loss(held).item(), rel=1e-4)
        for step in range(6):
            value = loss(batches(kept, 4, 5, step))
            value.backward()
            assert history["loss"][step] == pytest.approx(value.item(), rel=1e-4)
            rate = 3e-3 * ((step + 1) / 2 if step < 2 else 0.5 * (1 + math.cos(math.pi * (step - 2) / 4)))
            for kind, p in slow.delta.items():
                first[kind] = 0.9 * first[kind] + 0.1 * p.grad
                second[kind] = 0.95 * second[kind] + 0.05 * p.grad**2
                mean, square = first[kind] / (1 - 0.9 ** (step + 1)), second[kind] / (1 - 0.95 ** (step + 1))
                p.data -= rate * mean / (square.sqrt() + 1e-8)
                p.grad = None
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


def same(a: tuple[Student, dict[str, Any]], b: tuple[Student, dict[str, Any]]) -> bool:
    return a[1] == b[1] and all(torch.equal(p, b[0].delta[kind]) for kind, p in a[0].delta.items())


def killed_after(steps: int) -> Callable[[int, float], None]:
    def progress(done: int, loss: float) -> None:
        if done > steps:
            raise Killed

    return progress


@pytest.mark.parametrize("save_every", [1, 2])
def test_six_steps_are_three_and_three_more(bench: Bench, tmp_path: Path, save_every: int) -> None:
    undisturbed = bench.train(tmp_path / "a")
    with pytest.raises(Killed):
        bench.train(tmp_path / "b", progress=killed_after(3), save_every=save_every)
    done = []
    resumed = bench.train(tmp_path / "b", progress=lambda step, loss: done.append(step), save_every=save_every)
    assert done == list(range(4 if save_every == 1 else 3, 7))
    assert same(undisturbed, resumed)
    loop.clear_state(tmp_path / "b")
    assert list((tmp_path / "b").iterdir()) == []


FILES = ("history.part", "tensors.part", "tensors", "history")


@pytest.mark.parametrize("save", [1, 3])
@pytest.mark.parametrize("after", FILES)
def test_a_kill_between_the_two_files_loses_at_most_a_save(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: int, after: str
) -> None:
    undisturbed = bench.train(tmp_path / "a")
    saves, folder = [], tmp_path / "b"
    real_save, real_replace, real_write = loop.save_tensors, Path.replace, Path.write_text

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
        patch.setattr(loop, "save_tensors", save_tensors)
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


def run_stage(bench: Bench, out: Path, learn: dict[str, float], slots: Any = ALL, steps: int = 4) -> dict[str, Any]:
    corpus = Corpus(bench.windows, "print", "text.txt")
    train = Train(learn=learn, steps=steps, batch=4, length=LENGTH)
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
    assert not any((tmp_path / "out" / name).exists() for name in (loop.RESUME, loop.HISTORY))


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
