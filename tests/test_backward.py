"""Loss and gradients of a micro-batch, in chunks, with every loss and every source of the teacher's outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qat import backward, losses, teacher
from qat.backward import Backward, head_loss
from qat.model import Model
from qat.student import Student, run_blocks
from qat.teacher import HiddenCache, Resident, TopCache
from tests.artifacts import config_of, make
from tests.test_student import dense, shake, student_of

WINDOWS = torch.randint(128, (9, 16), generator=torch.Generator().manual_seed(4))
BATCH, NUMBERS = WINDOWS[2:5], torch.tensor([2, 3, 4])
TEMPERATURE = 2.0


@pytest.fixture(scope="module")
def config() -> Any:
    return config_of("llama")


@pytest.fixture(scope="module")
def models(config: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """(artifact, the parent: other random linears are no matter here, the same folder with other numbers)."""
    root = tmp_path_factory.mktemp("models")
    return make(root / "student", config), make(root / "teacher", config, seed=1)


def pair(config: Any, models: tuple[Any, Any]) -> tuple[Model, Student]:
    artifact, parent = models
    student = student_of(config, artifact, ("bias", "scale"))
    shake(student)
    model = Model(config, parent, resident=True)
    student.teacher = model
    for path in ("model.embed_tokens", "model.norm", "lm_head"):
        student._set(path, model.root.get_submodule(path))
    return model, student


def slow_loss(config: Any, models: tuple[Any, Any], student: Student, weights: dict[str, float]) -> Tensor:
    """From whole logits and Hugging Face's teacher; a gradient to the student's last hidden state only."""
    model = dense(config, models[1])
    with torch.no_grad():
        goal = model(BATCH, output_hidden_states=True)
        inner = model.model
        inner.norm, norm = torch.nn.Identity(), inner.norm
        goal_hidden = inner(BATCH).last_hidden_state
        inner.norm = norm
    with student.ends():
        hidden = run_blocks(student, BATCH)
        logits = student.logits(hidden)
    total = torch.zeros(())
    for n in range(len(BATCH)):
        for t in range(BATCH.shape[1]):
            p = F.softmax(goal.logits[n, t] / TEMPERATURE, -1)
            q = F.softmax(logits[n, t] / TEMPERATURE, -1)
            kl = (p * (p.log() - q.log())).sum() * TEMPERATURE**2
            total = total + weights.get("kl", 0) * kl / BATCH.numel()
            error = (hidden[n, t] - goal_hidden[n, t]).square().sum() / goal_hidden[n, t].square().sum()
            total = total + weights.get("hidden", 0) * error / BATCH.numel()
    ce = F.cross_entropy(logits[:, :-1].flatten(0, 1), BATCH[:, 1:].flatten())
    return total + weights.get("ce", 0) * ce


@pytest.mark.parametrize("chunk", [16, 23, 1000])
@pytest.mark.parametrize("weights", [{"kl": 1.0}, {"ce": 0.7}, {"hidden": 2.0}, {"kl": 0.5, "ce": 0.2, "hidden": 3.0}])
def test_the_loss_in_chunks_is_the_loss(
    config: Any, models: Any, monkeypatch: pytest.MonkeyPatch, chunk: int, weights: dict[str, float]
) -> None:
    model, student = pair(config, models)
    monkeypatch.setitem(backward.LOGIT_BYTES, "cpu", 4 * config.vocab_size * backward.LIVE * chunk)
    seen, real = [], student.logits
    monkeypatch.setattr(student, "logits", lambda h: seen.append(len(h)) or real(h))
    step = Backward(Resident(model), student, weights, TEMPERATURE, BATCH.numel())
    with student.ends():
        step.zero()
        step.add(BATCH[:2], NUMBERS[:2])
        step.add(BATCH[2:], NUMBERS[2:])
    monkeypatch.undo()
    assert max(seen, default=0) <= chunk and sum(seen) == (0 if "hidden" in weights and len(weights) == 1 else 48)
    grads = [part.grad.clone() for part in student.parts.values()]
    student.zero_grad()
    expected = slow_loss(config, models, student, weights)
    expected.backward()
    assert torch.allclose(step.loss, expected, rtol=1e-4) and not step.loss.requires_grad
    for ours, part in zip(grads, student.parts.values(), strict=True):
        assert (ours - part.grad).norm() <= 1e-3 * part.grad.norm() and part.grad.norm() > 0


def test_no_gradient_is_formed_where_none_is_wanted(config: Any, models: Any) -> None:
    model, student = pair(config, models)
    with student.ends(), torch.no_grad():
        hidden = run_blocks(student, BATCH)
        target = Resident(model).run(BATCH)
        loss = head_loss(Resident(model), student, target, hidden, BATCH, {"kl": 1.0}, 1.0, BATCH.numel())
    assert loss > 0 and not loss.requires_grad and all(part.grad.abs().sum() == 0 for part in student.parts.values())


@settings(max_examples=30, deadline=None)
@given(top=st.integers(1, 12), t=st.sampled_from([0.5, 1.0, 3.0]), seed=st.integers(0, 20))
def test_likely_tokens_and_the_rest_as_one_event(top: int, t: float, seed: int) -> None:
    goal, logits = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(seed)) * 2
    logits.requires_grad_()
    indices, p_log = losses.top_log(goal, top, t)
    found = losses.top_kl(indices, p_log, logits, t)
    total = torch.zeros(())
    for n in range(5):
        p, q = F.softmax(goal[n] / t, -1), F.softmax(logits[n] / t, -1)
        order = sorted(range(12), key=lambda i: -p[i].item())
        first, rest = order[:top], order[top:]
        total = total + sum(p[i] * (p[i] / q[i]).log() for i in first)
        if rest:
            p_rest, q_rest = sum(p[i] for i in rest), sum(q[i] for i in rest)
            total = total + p_rest * (p_rest / q_rest).log()
    assert torch.allclose(found, total * t**2, rtol=1e-2, atol=5e-3 * t**2)  # float16 log-probabilities
    assert found <= losses.kl(goal, logits, t) + 5e-3 * t**2
    ours, theirs = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (found, total * t**2))
    assert torch.allclose(ours, theirs, rtol=2e-2, atol=2e-3 * t)


def grads_of(source: Any, student: Student) -> list[Tensor]:
    step = Backward(source, student, {"kl": 1.0}, 1.0, BATCH.numel())
    with student.ends():
        step.zero()
        step.add(BATCH, NUMBERS)
    return [step.loss.clone(), *(part.grad.clone() for part in student.parts.values())]


@pytest.mark.parametrize("resident", [True, False])
def test_hidden_states_on_disk_stand_for_the_teacher(
    config: Any, models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resident: bool
) -> None:
    model, student = pair(config, models)
    expected = grads_of(Resident(model), student)
    model.resident = resident
    numbers = torch.tensor([4, 2, 3, 8, 3])
    cache = HiddenCache(model, WINDOWS, numbers, tmp_path / "teacher-0-of-1", 2)
    assert all(p.is_meta for block in model.blocks for p in block.parameters())
    model.resident = True
    for ours, theirs in zip(grads_of(cache, student), expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        inner = dense(config, models[1]).model
        inner.norm = torch.nn.Identity()
        exact = inner(WINDOWS[8:]).last_hidden_state
    assert torch.allclose(cache.hidden(torch.tensor([8]), WINDOWS[8:]), exact, rtol=1e-4, atol=1e-5)

    # made once: another run with the same windows computes nothing, one with others does
    calls, real = [], teacher._outputs
    monkeypatch.setattr(teacher, "_outputs", lambda *args: calls.append(args) or real(*args))
    again = HiddenCache(model, WINDOWS, numbers, tmp_path / "teacher-0-of-1", 2)
    assert not calls and torch.equal(again.stored(NUMBERS)[0], cache.stored(NUMBERS)[0])
    HiddenCache(model, (WINDOWS + 1) % 128, numbers, tmp_path / "teacher-0-of-1", 2)
    assert len(calls) == 1


def test_likely_tokens_on_disk(config: Any, models: Any, tmp_path: Path) -> None:
    """All tokens kept: the KL itself; fewer: less than it, and the tail says how much mass is merged."""
    model, student = pair(config, models)
    expected = grads_of(Resident(model), student)
    with torch.no_grad():
        p = dense(config, models[1])(BATCH).logits.softmax(-1)
    held = torch.tensor([7, 8])
    tails, found = {}, {}
    for top in (config.vocab_size, 8):
        numbers = torch.cat([NUMBERS, held])
        fresh = Model(config, models[1], resident=True)
        cache = TopCache(fresh, WINDOWS, numbers, held, tmp_path / f"teacher-{top}", 2, top, 1.0, 5)
        student.teacher = fresh
        for path in ("model.embed_tokens", "model.norm", "lm_head"):
            student._set(path, fresh.root.get_submodule(path))
        tails[top], found[top] = cache.tail, grads_of(cache, student)
        assert cache.hidden(held, WINDOWS[7:]).shape == (2, 16, config.hidden_size)
    assert tails[config.vocab_size] == pytest.approx(0, abs=2e-3)
    assert tails[8] == pytest.approx(1 - p.topk(8, -1).values.sum(-1).mean().item(), abs=2e-3)
    for ours, theirs in zip(found[config.vocab_size], expected, strict=True):
        assert (ours - theirs).norm() <= 5e-3 * theirs.norm()
    assert found[8][0] < expected[0]
    assert torch.cosine_similarity(found[8][1], expected[1], 0) > 0.8


def test_a_graph_that_computes_something_else_is_an_error() -> None:
    same = [torch.ones(3), torch.ones(2)]
    noisy = [torch.ones(3), torch.tensor([1.0, 1.01])]
    backward._check_same([same, same], [t * (1 + 1e-5) for t in same], [1e-4, 1e-3])
    backward._check_same([[torch.zeros(2)]] * 2, [torch.zeros(2)], [1e-4])
    backward._check_same([noisy, same], [torch.ones(3), torch.tensor([1.02, 1.0])], [1e-4, 1e-3])  # kernels that vary
    for before, wrong in (
        (same, [torch.ones(3), torch.ones(2) * 1.01]),
        (same, [torch.full((3,), torch.nan), torch.ones(2)]),
        (noisy, [torch.ones(3), torch.tensor([1.04, 1.0])]),
    ):
        with pytest.raises(ValueError, match=r"differs by .* set train\.cuda_graph to false"):
            backward._check_same([before, same], wrong, [1e-4, 1e-3])


def test_what_a_block_keeps_is_measured(config: Any, models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, student = pair(config, models)
    one, two = backward.kept_bytes(student, 1, 16), backward.kept_bytes(student, 2, 16)
    # at least the input of each linear (scales are learned) and of the activation function, in float32
    assert one >= 4 * 16 * (2 * config.hidden_size + 2 * config.intermediate_size) and 1.7 * one < two <= 2 * one
    logits = 4 * backward.LIVE * 2 * 16 * config.vocab_size
    enough = int((logits + 2.1 * two) / backward.SPARE)  # for both blocks of one rank
    for free, ranks, expected in ((10 * two + 2**40, 1, 0), (0, 1, 2), (enough, 1, 0), (enough, 4, 2)):
        monkeypatch.setattr(backward.psutil, "virtual_memory", lambda free=free: type("", (), {"available": free}))
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert backward.blocks_to_checkpoint(student, 2, 16) == expected


def test_no_leaf_of_the_graph_outlives_a_forward_pass(config: Any, models: Any) -> None:
    """One that did would belong to the stream it was first used on, and no CUDA graph could be captured after it."""
    student = student_of(config, models[0], ("bias", "norm", "scale"))
    with student.ends():
        hidden = run_blocks(student, BATCH)
    leaves, seen, ahead = [], set(), [hidden.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaves += [node.variable] if hasattr(node, "variable") else []
        ahead += [following for following, _ in node.next_functions]
    assert leaves
    assert not any(leaf.numel() for leaf in leaves), "a parameter is a leaf"
    assert len({id(leaf) for leaf in leaves}) >= len(student.linears), "a leaf is shared by linears"
