"""Compiled blocks compute what the plain ones do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters

from qat import compiled
from qat.backward import Backward, kept_bytes
from qat.model import Model
from qat.student import Student
from qat.teacher import HiddenCache, Resident
from tests.artifacts import config_of, make
from tests.test_student import student_of

WINDOWS = torch.randint(128, (4, 16), generator=torch.Generator().manual_seed(4))
NUMBERS = torch.arange(4)
WHY_NOT = compiled.refusal([], torch.device("cpu"))
needs_compiler = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


def once(student: Student, backward: Backward) -> list[torch.Tensor]:
    """Loss and gradients of two micro-batches."""
    student.refresh()
    backward.zero()
    for part in NUMBERS.split(2):
        backward.add(WINDOWS[part], part)
    student.pull()
    return [backward.loss.clone(), *(p.grad.clone() for p in student.delta.values() if p.grad is not None)]


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("family", "cached", "checkpointed"), [("llama", True, 0), ("qwen3", False, 1), ("gemma3_text", False, 0)]
)
def test_gradients_are_those_of_the_plain_blocks(tmp_path: Path, family: str, cached: bool, checkpointed: int) -> None:
    config = config_of(family)
    student = student_of(config, make(tmp_path / "student", config), ("bias", "scale"))
    model = Model(config, make(tmp_path / "teacher", config, seed=1), resident=True)
    for path in (model.arch.embed, model.arch.norm, model.arch.head):
        student._set(path, model.root.get_submodule(path))
    student.teacher = model
    with student.ends():
        teacher = HiddenCache(model, WINDOWS, NUMBERS, tmp_path / "cache", 2) if cached else Resident(model)
        backward = Backward(teacher, student, {"kl": 1.0}, 1.0, WINDOWS.numel(), checkpointed)
        found, kept = once(student, backward), kept_bytes(student, 2, 16)
        compiled.compile_blocks(student, model)
        now_found, now_kept = once(student, backward), kept_bytes(student, 2, 16)
        assert len(found) == 3
        for ours, theirs in zip(now_found, found, strict=True):
            assert theirs.norm() > 0 and (ours - theirs).norm() <= 1e-4 * theirs.norm()
        with compiled.plain(True):
            assert all(torch.equal(a, b) for a, b in zip(once(student, backward), found, strict=True))
    # of the activation function its input is kept at most, not what it gives as well
    assert now_kept <= kept - 4 * 2 * 16 * config.intermediate_size


@pytest.mark.slow
@needs_compiler
def test_blocks_share_what_is_compiled(tmp_path: Path) -> None:
    """torch.compile gives up on a function after eight versions of it, quietly, and runs it as it is."""
    made = []
    for blocks in (4, 12):
        config = config_of("llama", num_hidden_layers=blocks)
        artifact = make(tmp_path / str(blocks), config)
        student = student_of(config, artifact, ("bias", "scale"))
        compiled.compile_blocks(student, student.teacher)
        counters.clear()
        with student.ends():
            once(student, Backward(Resident(student.teacher), student, {"kl": 1.0}, 1.0, WINDOWS.numel(), 1))
        made.append(counters["stats"]["unique_graphs"])
    assert made[0] == made[1] > 0


def test_blocks_that_were_not_read_yet_are_compiled_as_well(tmp_path: Path) -> None:
    config = config_of("llama")
    model = Model(config, make(tmp_path, config), resident=True)
    compiled.compile_blocks(model)
    assert all(next(block.parameters()).is_meta and "forward" in vars(block) for block in model.blocks)


def test_what_cannot_be_compiled_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compiled.shutil, "which", lambda name: name in ("g++", "clang") and name)
    assert compiled.refusal(["bias"], cpu) is None and compiled.refusal(["bias"], gpu) is None
    assert "norm" in str(compiled.refusal(["bias", "norm"], gpu))
    assert "split over ranks" in str(compiled.refusal(["bias"], gpu, sharded=True))
    assert "experts" in str(compiled.refusal(["bias"], gpu, experts=True))
    monkeypatch.setenv("CC", "icx")  # Triton compiles C, inductor's kernels for a CPU are C++
    assert compiled.refusal(["bias"], cpu) is None
    assert "there is no icx (CC)" in str(compiled.refusal(["bias"], gpu))
    monkeypatch.setattr(compiled.shutil, "which", lambda name: name == "icx" and name)
    assert "there is no g++ (CXX)" in str(compiled.refusal(["bias"], cpu)) and compiled.refusal(["bias"], gpu) is None
    monkeypatch.setattr(compiled.sysconfig, "get_path", lambda name: "/nowhere")
    assert "Python.h" in str(compiled.refusal(["bias"], gpu))


def test_it_pays_by_the_work_there_is() -> None:
    sizes = [(64, 96), (96, 64)]
    linears = {str(i): torch.nn.Linear(*size, device="meta") for i, size in enumerate(sizes)}
    model = SimpleNamespace(in_features=linears, root=torch.nn.ModuleDict(linears))
    most = compiled.PAYS / (8 * 2 * 64 * 96)
    assert [compiled.pays(model, tokens) for tokens in (int(most * 0.99), int(most * 1.01))] == [False, True]  # type: ignore[arg-type]
