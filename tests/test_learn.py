"""Every learnable against Hugging Face's forward and autograd, what is exported, and how much work a step is."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from qat import plugins
from qat.artifact import Artifact, derive
from qat.learn import round as learn_round
from qat.model import Model
from qat.quant import signed_codes
from qat.student import Student, run_blocks
from tests.artifacts import ALL, SIZES, config_of, make
from tests.test_student import IDS, dense, logits, shake, student_of

MIXES = (("bias",), ("scale",), ("gain",), ("norm",), ("bias", "gain", "norm"), ("gain", "scale"), ("round",),
         ("zero",), ("bias", "gain", "norm", "round", "scale", "zero"))  # fmt: skip
SCHEMES = ("int4", "int4-channel", "int4-asym")


def fits(mix: tuple[str, ...], scheme: str) -> bool:
    return "zero" not in mix or scheme == "int4-asym"


ALL_BUT_ZERO = ("bias", "gain", "norm", "round", "scale")
CASES = [(mix, scheme) for mix in MIXES for scheme in SCHEMES if fits(mix, scheme)]
CASES += [(mix, scheme) for mix in (("round",), ALL_BUT_ZERO) for scheme in ("int8", "mixed")]


def scheme_of(name: str) -> Any:
    """One of tests/artifacts.py, or int4 with the last linear of each block in int8."""
    rules = {"weights": {"dtype": "int4", "group_size": 32}, "overrides": {"*.down_proj": {"dtype": "int8"}}}
    return rules if name == "mixed" else name


def ends_of(artifact: Artifact, name: str) -> tuple[int, int]:
    """Lowest and highest code of a linear."""
    return (-128, 127) if artifact.formats[name].dtype == "int8" else (0, 15)


def stirred(student: Student) -> None:
    """Random deltas; those of integers large enough to move some."""
    shake(student)
    for kind in ("round", "zero"):
        if kind in student.delta:
            student.delta[kind].data *= 5
    student.refresh()


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    return x + (rounded - x).detach()


def grid(x: Tensor) -> Tensor:
    return straight_through(x, x.bfloat16().half().float())


def reference_logits(model: Any, student: Student, deltas: dict[str, Tensor]) -> Tensor:
    """HF's forward with parameters made of the stored tensors and `deltas` by the formulas in qat/learn."""
    artifact = student.artifact

    def of(kind: str, name: str, shape: Any) -> Tensor:
        if kind not in deltas:
            return torch.zeros(shape)
        module = student.modules[kind]
        views = student.parts[module.PART].views(deltas[kind], by_row=module.PER == "row")
        return views[name].view(shape) if name in views else torch.zeros(shape)

    parameters = {}
    for name in artifact.formats:
        q = artifact.quantized(name)
        codes, groups = q.codes.float(), q.scale.shape
        moved = codes + of("round", name, codes.shape)
        first, last = ends_of(artifact, name)
        low, high = (codes - 1).clamp_min(first), (codes + 1).clamp_max(last)
        codes = straight_through(moved, torch.minimum(torch.maximum(moved.round(), low), high))
        middle = torch.full(groups, 8.0 if first == 0 else 0.0)
        zero = middle if q.zero is None else q.zero.float() + of("zero", name, groups)
        zero = straight_through(zero, zero.round().clamp(0, 15))
        gain = 1 + of("gain", name, (len(codes), 1))
        scale = grid(q.scale * gain * (1 + of("scale", name, groups)))
        by_group = codes.view(*groups, -1) - zero[..., None]
        parameters[f"{name}.weight"] = (by_group * scale[..., None]).view(codes.shape)
        if "bias" in deltas:
            unit = student.parts["bias"].views(student.parts["bias"].unit, by_row=True)[name]
            stored = artifact.raw(f"{name}.bias").float()
            parameters[f"{name}.bias"] = grid(stored + unit * of("bias", name, (len(codes),)))
    if "norm" in deltas:
        for name in student.parts["norm"].shapes:
            weight = artifact.get(name).float()
            parameters[name] = grid(weight * (1 + of("norm", name, weight.shape)))
    return functional_call(model, parameters, (IDS,)).logits


@pytest.mark.parametrize(("mix", "scheme"), CASES)
def test_gradients_are_those_of_autograd_through_the_whole_model(
    tmp_path: Path, mix: tuple[str, ...], scheme: str
) -> None:
    flags = {"attention_bias": True, "mlp_bias": True}
    config = config_of("llama", **(flags if "bias" in mix else {}))
    artifact = make(tmp_path, config, scheme_of(scheme))
    student = student_of(config, artifact, mix)
    student.begin(IDS)
    stirred(student)
    deltas = {kind: p.detach().clone().requires_grad_() for kind, p in student.delta.items()}
    weights = torch.randn(*IDS.shape, config.vocab_size, generator=torch.Generator().manual_seed(9))
    expected = reference_logits(dense(config, artifact), student, deltas)
    (expected * weights).mean().backward()
    with student.ends():
        student.zero_grad()
        found = student.logits(run_blocks(student, IDS))
        (found * weights).mean().backward()
        student.pull()
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-3)  # x + (r - x) is not quite r
    inside = {kind: torch.ones_like(p, dtype=torch.bool) for kind, p in deltas.items()}
    for kind in {"round", "zero"} & set(mix):  # beyond their ends, ours stops the gradients that lead out
        part = student.parts[student.modules[kind].PART]
        moved = (part.start + deltas[kind]).detach()
        ends = [torch.tensor(ends_of(artifact, n)).expand(math.prod(s), 2) for n, s in part.shapes.items()]
        low, high = torch.cat(ends).unbind(1)
        if kind == "round":
            low, high = torch.maximum(low, part.start - 1), torch.minimum(high, part.start + 1)
        inside[kind] = (moved >= low) & (moved <= high)
        assert 0.3 < inside[kind].float().mean() < 1
    for kind, p in deltas.items():
        ours, theirs = student.delta[kind].grad[inside[kind]], p.grad[inside[kind]]
        # a gain alone takes its gradient from outputs, where the grid's rounding (2^-9) of its scales is still in
        tolerance = 3e-2 if kind == "gain" and "scale" not in mix else 1e-3
        assert (ours - theirs).norm() <= tolerance * theirs.norm() and theirs.norm() > 0, kind


@pytest.mark.parametrize(("mix", "scheme"), CASES)
def test_what_is_learned_is_what_is_exported(tmp_path: Path, mix: tuple[str, ...], scheme: str) -> None:
    config = config_of("llama")
    artifact = make(tmp_path / "start", config, scheme_of(scheme))
    student = student_of(config, artifact, mix)
    with torch.no_grad():
        before = logits(student)
        assert torch.equal(before, dense(config, artifact)(IDS).logits)
        stirred(student)
        after = logits(student)
    overlay = student.overlay()
    derive(tmp_path / "start", tmp_path / "trained", overlay, {})
    trained = Artifact(tmp_path / "trained")
    with torch.no_grad():
        assert not torch.allclose(before, after, atol=1e-4)
        assert torch.equal(after, dense(config, trained)(IDS).logits)
    for name, value in overlay.items():
        if not name.endswith(".bias"):
            assert (value.dtype, value.shape) == (artifact.raw(name).dtype, artifact.raw(name).shape), name
        if value.is_floating_point():
            assert torch.equal(value.float().half().float(), value.float()), name
            assert torch.equal(value.float().bfloat16().float(), value.float()), name
    moved = 0
    for name in artifact.formats:
        apart = trained.quantized(name).codes.int() - artifact.quantized(name).codes.int()
        assert apart.abs().max() <= 1
        moved += int(apart.abs().sum())
    assert (moved > 0) == ("round" in mix)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_moe", "phi3"])
def test_other_families_learn_too(tmp_path: Path, family: str) -> None:
    config = config_of(family)
    artifact = make(tmp_path / "start", config)
    student = student_of(config, artifact, ("gain", "norm", "scale"))
    offset = 1.0 if family.startswith("gemma") else 0.0
    student.begin(IDS)
    stored = student.parts["norm"].start
    assert torch.allclose(student.parts["norm"].unit, stored + offset)
    stirred(student)
    derive(tmp_path / "start", tmp_path / "trained", student.overlay(), {})
    again = student_of(config, Artifact(tmp_path / "trained"), ("bias",))
    assert torch.equal(logits(student), logits(again))
    with student.ends():
        student.zero_grad()
        student.logits(run_blocks(student, IDS)).square().mean().backward()
        student.pull()
    assert all(p.grad.abs().sum() > 0 for p in student.delta.values())


@pytest.mark.parametrize(("kind", "scheme", "why"), [
    ("zero", "int4", "it has no zero points"), ("scale", "fp8-channel", "it is for"),
    ("round", "fp8-tensor", "it is for"),
])  # fmt: skip
def test_what_a_format_has_no_place_for_is_an_error(tmp_path: Path, kind: str, scheme: str, why: str) -> None:
    config = config_of("llama")
    with pytest.raises(ValueError, match=rf"train\.learn\.{kind} does not work on .*q_proj, which is .*: {why}"):
        student_of(config, make(tmp_path, config, scheme), (kind,))


def flops(student: Student) -> tuple[int, int]:
    """Of a forward pass and of forward and backward together, blocks and head."""
    with student.ends(), torch.no_grad(), FlopCounterMode(display=False) as forward:
        student.logits(run_blocks(student, IDS))
    with student.ends(), FlopCounterMode(display=False) as both:
        student.logits(run_blocks(student, IDS)).sum().backward()
    return forward.get_total_flops(), both.get_total_flops()


@pytest.mark.parametrize("mix", [("bias",), ("gain",), ("norm",), ("bias", "gain", "norm"), ("scale",), ("zero",)])
def test_only_what_needs_it_forms_a_gradient_of_the_weight(tmp_path: Path, mix: tuple[str, ...]) -> None:
    config = config_of("llama")
    scheme = "int4-asym" if "zero" in mix else "int4"
    student = student_of(config, make(tmp_path, config, scheme), mix)
    tokens, hidden, ffn = IDS.numel(), SIZES["hidden_size"], SIZES["intermediate_size"]
    kv = hidden // SIZES["num_attention_heads"] * SIZES["num_key_value_heads"]
    head = 2 * tokens * hidden * SIZES["vocab_size"]
    qkv = 2 * tokens * hidden * (hidden + 2 * kv)
    linears = 2 * (qkv + 2 * tokens * hidden * (hidden + 3 * ffn))  # two blocks
    forward, both = flops(student)
    attention = forward - linears - head
    assert attention >= 0
    first = 0 if mix == ("norm",) or "norm" in mix else qkv  # nothing learned lies before the first q, k and v
    weight = linears if set(mix) & {"scale", "zero"} else 0
    backward_of_attention = both - forward - (linears - first) - head - weight
    # of a fused attention the counter counts 2.5 times the forward for backward, of an unfused one twice
    assert 0 <= backward_of_attention <= 2.5 * attention
    assert qkv > 2.5 * attention or linears > 10 * attention  # so that a missing or extra product would show


def bytes_held() -> int:
    """Of all tensors that are alive."""
    gc.collect()
    # by type: asking some other objects for their class makes them import things
    alive = [one for one in gc.get_objects() if type(one) in (Tensor, torch.nn.Parameter)]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in alive}
    return sum(storages.values())


def test_codes_take_the_memory_that_plan_counts(tmp_path: Path) -> None:
    config = config_of("llama")
    artifact = make(tmp_path, config)
    weights = sum(artifact.quantized(name).codes.numel() for name in artifact.formats)
    held = []
    for mix in (("scale",), ("round", "scale")):
        before = bytes_held()
        student = student_of(config, artifact, mix)
        optimizer = torch.optim.AdamW(student.delta.values())
        with student.ends():
            student.zero_grad()
            student.logits(run_blocks(student, IDS)).square().mean().backward()
            student.pull()
        optimizer.step()
        student.refresh()
        held.append(bytes_held() - before)
        del student, optimizer
    assert 0.9 < (held[1] - held[0]) / weights / learn_round.BYTES_PER_WEIGHT < 1


@pytest.mark.parametrize("blocks", [1, 2])
def test_repeating_the_forward_pass_changes_no_gradient(tmp_path: Path, blocks: int) -> None:
    config = config_of("llama")
    student = student_of(config, make(tmp_path, config), ("bias", "scale", "norm"))
    shake(student)
    grads = []
    for checkpointed in (0, blocks):
        with student.ends():
            student.zero_grad()
            student.logits(run_blocks(student, IDS, checkpointed)).square().mean().backward()
        grads.append([part.grad.clone() for part in student.parts.values()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True)) and all(g.abs().sum() > 0 for g in grads[0])


class Parent:
    """Random weights for the linears, everything else as in the artifact."""

    def __init__(self, artifact: Artifact, other: Artifact) -> None:
        self.artifact, self.other = artifact, other

    def names(self) -> list[str]:
        return self.artifact.names()

    def get(self, name: str) -> Tensor:
        linear = name.removesuffix(".weight") in self.artifact.formats
        return (self.other if linear else self.artifact).get(name)


def with_options(config: Any, artifact: Artifact, parent: Any, **learn: dict[str, Any]) -> Student:
    options = {kind: plugins.options("qat.learn", kind)(**given) for kind, given in learn.items()}
    return Student(Model(config, parent, resident=True), artifact, options, ALL)


def test_the_closed_form_start_takes_away_the_mean_error(tmp_path: Path) -> None:
    """Against the mean inputs of HF's own model that already holds the biases of earlier blocks."""
    config = config_of("llama", attention_bias=True, mlp_bias=True)
    artifact = make(tmp_path / "a", config)
    parent = Parent(artifact, make(tmp_path / "b", config, seed=1))
    student = with_options(config, artifact, parent, bias={"start": "mean", "skip_tokens": 3})
    student.begin(IDS)
    biases = student.parts["bias"].views(student.parts["bias"].start, by_row=True)
    reference, seen = dense(config, artifact), {}
    for index in range(2):
        names = [f"model.layers.{index}.{leaf}" for leaf in ALL]
        handles = [
            reference.get_submodule(name).register_forward_pre_hook(
                lambda m, args, name=name: seen.update({name: args[0]})
            )
            for name in names
        ]
        with torch.no_grad():
            reference(IDS)
        for handle in handles:
            handle.remove()
        for name in names:
            mean = seen[name][:, 3:].flatten(0, 1).mean(0)
            expected = (parent.get(f"{name}.weight") - artifact.get(f"{name}.weight")).float() @ mean
            expected += artifact.get(f"{name}.bias").float()  # the parent's own
            assert torch.allclose(biases[name], expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())), name
            reference.get_submodule(name).bias.data.copy_(expected.bfloat16().half().float())


def test_rounding_starts_between_the_codes(tmp_path: Path) -> None:
    config = config_of("llama")
    artifact = make(tmp_path / "a", config)
    parent = Parent(artifact, make(tmp_path / "b", config, seed=1))
    student = with_options(config, artifact, parent, round={})
    student.begin(IDS)
    with torch.no_grad():
        assert torch.equal(logits(student), dense(config, artifact)(IDS).logits)  # no code has moved yet
    deltas = student.parts["codes"].views(student.delta["round"], by_row=False)
    for name in artifact.formats:
        q = artifact.quantized(name)
        steps = parent.get(f"{name}.weight").view(*q.scale.shape, -1) / q.scale[..., None]
        expected = (steps.view(q.codes.shape) - signed_codes(q)).clamp(-0.49, 0.49)
        assert torch.allclose(deltas[name], expected, atol=1e-5)
