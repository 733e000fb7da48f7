"""The training loop: its loss and optimizer against slow ones, resume to the bit, and errors that stop it."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qat import loop, resume
from qat.losses import kl
from qat.student import Student, run_blocks
from qat.tokens import batches
from tests.bench import Bench


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours catches it."""


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
    values = [value for _, value in stopped["validation"]]
    assert stopped["ended"] and 1 < len(values) < 12
    assert values[-1] >= values[-2] == min(values) == pytest.approx(stopped["validation_end"], rel=1e-5)


@pytest.mark.parametrize(("more", "times"), [({}, 2), ({"validate_every": 2}, 4), ({"validate_every": 4}, 3)])
def test_nothing_is_validated_twice(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, int], times: int
) -> None:
    """Of six steps: before the first, after each that is asked for and the last; what is kept is not measured again."""
    values = iter([9.0, 3.0, 2.0, 4.0])
    monkeypatch.setattr(loop, "evaluate", lambda *_: next(values))
    history = bench.train(tmp_path, **more)[1]
    assert len(list(values)) == 4 - times
    found = [value for _, value in history["validation"]]
    assert history["validation_end"] == min(found, default=3.0)


def same(a: tuple[Student, dict[str, Any]], b: tuple[Student, dict[str, Any]]) -> bool:
    return a[1] == b[1] and all(torch.equal(p, b[0].delta[kind]) for kind, p in a[0].delta.items())


def killed_after(steps: int) -> Callable[[int, Any], None]:
    def progress(done: int, numbers: Any) -> None:
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


def on_ranks(bench: Bench, folder: Path, world: int, **how: Any) -> tuple[Student, dict[str, Any]]:
    """What rank 0 ends with when `world` threads of this process are the ranks."""
    met, said = threading.Barrier(world, timeout=60), dict[int, torch.Tensor]()

    def rank(index: int) -> Any:
        def reduce(flat: torch.Tensor, reduction: str) -> torch.Tensor:
            said[index] = flat
            met.wait()
            mean = torch.stack([said[one] for one in range(world)]).mean(0)
            met.wait()
            return mean

        return SimpleNamespace(
            num_processes=world,
            process_index=index,
            gradient_accumulation_steps=1,
            is_main_process=index == 0,
            reduce=reduce,
        )

    folder.mkdir(exist_ok=True)
    with ThreadPoolExecutor(world) as pool:
        ends = [pool.submit(bench.train, folder, rank(index), **how) for index in range(world)]
        return next(end.result() for end in ends)


@pytest.mark.parametrize(("before", "after"), [(2, 2), (1, 2), (2, 1), (4, 2)])
def test_a_run_goes_on_with_any_number_of_ranks(bench: Bench, tmp_path: Path, before: int, after: int) -> None:
    """With as many as before to the bit; else up to the last bits of sums, which are in another order."""
    how = MIXES["every"]
    with pytest.raises(Killed):
        on_ranks(bench, tmp_path / "a", before, progress=killed_after(3), **how)
    done: list[int] = []
    resumed = on_ranks(bench, tmp_path / "a", after, progress=lambda step, _: done.append(step), **how)
    assert sorted(done) == sorted([4, 5, 6] * after)
    if before == after:
        assert same(on_ranks(bench, tmp_path / "b", before, **how), resumed)
    alone = bench.train(tmp_path / "c", **how)
    for key in ("loss", "validation_start", "validation_end"):
        assert resumed[1][key] == pytest.approx(alone[1][key], rel=2e-3), key
    for kind, p in alone[0].delta.items():
        assert (resumed[0].delta[kind] - p).norm() < 0.05 * p.norm(), kind


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


def test_ranks_that_measure_different_numbers_end_together(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = iter([4.0, 3.0, 2.0, 2.0, 2.0])  # of this rank; the other one's are twice as large
    monkeypatch.setattr(loop, "evaluate", lambda *_: next(measured))
    accelerator = SimpleNamespace(
        num_processes=2,
        process_index=0,
        gradient_accumulation_steps=1,
        is_main_process=True,
        reduce=lambda flat, reduction: flat * 1.5 if len(flat) == 1 else flat,
    )
    history = bench.train(tmp_path, accelerator, enough=3.1, validate_every=1)[1]
    assert history["validation"] == [[1, 4.5], [2, 3.0]] and history["ended"]
    assert history["validation_start"] == 6.0
