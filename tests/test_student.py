"""The student computes what its exported artifact computes, and learns only what the engines load."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from qat import plugins, starts
from qat.artifact import Artifact, derive
from qat.model import Model
from qat.student import Student, run_blocks
from tests.artifacts import ALL, KV_CACHE, SCHEMES, config_of, make

QKV = frozenset({"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"})
IDS = torch.randint(128, (3, 24), generator=torch.Generator().manual_seed(0))
LEARN = {"int4": ("bias", "scale"), "int4-channel": ("scale",), "int4-asym": ("bias", "scale"),
         "int8": ("bias", "scale"), "w8a8": ("bias", "scale"),
         "fp8-channel": ("bias",), "fp8-tensor": ("bias",), "fp8-block": ("bias",)}  # fmt: skip


def dense(config: Any, artifact: Artifact) -> nn.Module:
    """Hugging Face's own model with the dequantized weights, and inputs rounded as the scheme says."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    left = dict(model.named_parameters())
    with torch.no_grad():
        for name in artifact.names():
            owner, _, leaf = name.rpartition(".")
            if leaf == "bias" and name not in left:
                model.get_submodule(owner).bias = nn.Parameter(artifact.get(name).float())
                continue
            left.pop(name).copy_(artifact.get(name))
    for name, value in left.items():  # declared by the class, but not stored
        assert name.endswith(".bias"), name
        value.data.zero_()
    if artifact.scheme.inputs is not None:
        for name in artifact.formats:
            scale = artifact.raw(f"{name}.input_scale") if artifact.scheme.weights.per == "tensor" else None
            hook = int8_inputs if artifact.scheme.inputs.is_int else fp8_inputs(scale)
            model.get_submodule(name).register_forward_pre_hook(hook)
    return model


def int8_inputs(module: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
    scales = args[0].abs().amax(-1, keepdim=True) / 127
    return (args[0] / scales).round() * scales


def fp8_inputs(static: Tensor | None) -> Any:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        tokens = args[0].reshape(-1, args[0].shape[-1])  # narrower than a group of 128
        scales = tokens.abs().amax(-1, keepdim=True) / 448 if static is None else static
        return ((tokens / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales).view(args[0].shape)

    return hook


@torch.no_grad()
def logits(model: Model) -> Tensor:
    with model.ends():
        return model.logits(run_blocks(model, IDS))


def student_of(config: Any, artifact: Artifact, learn: Collection[str], slots: Collection[str] = ALL) -> Student:
    options = {kind: plugins.options("qat.learn", kind)() for kind in learn}
    return Student(Model(config, artifact, resident=True), artifact, options, slots)


def shake(student: Student) -> None:
    """Put random numbers where training would put small ones."""
    random = torch.Generator().manual_seed(3)
    for delta in student.delta.values():
        delta.data.copy_(torch.randn(delta.shape, generator=random) * 0.1)
    student.refresh()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_what_is_trained_is_what_is_exported(tmp_path: Path, family: str, scheme: str) -> None:
    config = config_of(family)
    artifact = make(tmp_path / "start", config, scheme, QKV if family == "qwen2" else frozenset())
    student = student_of(config, artifact, LEARN[scheme])
    before = logits(student)
    with torch.no_grad():
        assert torch.equal(before, dense(config, artifact)(IDS).logits)
        shake(student)
        after = logits(student)
        assert not torch.allclose(before, after, atol=1e-3)
        derive(tmp_path / "start", tmp_path / "trained", student.overlay(), {})
        assert torch.equal(after, dense(config, Artifact(tmp_path / "trained"))(IDS).logits)


def test_training_again_starts_where_training_ended(tmp_path: Path) -> None:
    config = config_of("llama")
    student = student_of(config, make(tmp_path / "start", config), ("bias", "scale"))
    shake(student)
    derive(tmp_path / "start", tmp_path / "trained", student.overlay(), {})
    again = student_of(config, Artifact(tmp_path / "trained"), ("bias",))
    assert torch.equal(logits(student), logits(again))


def test_the_overlay_holds_the_chosen_slots_on_the_grid_and_no_code_changes(tmp_path: Path) -> None:
    config, slots = config_of("llama"), frozenset({"self_attn.v_proj", "mlp.down_proj"})
    artifact = make(tmp_path / "start", config)
    student = student_of(config, artifact, ("bias", "scale"), slots)
    shake(student)
    student.delta["scale"].data[:5] = -3.0  # would turn the sign
    student.refresh()
    overlay = student.overlay()
    biases = {f"model.layers.{i}.{slot}.bias" for i in range(2) for slot in slots}
    scales = {f"{name}.scale" for name in artifact.formats}
    assert set(overlay) == biases | scales and len(scales) == 14
    for name, value in overlay.items():
        assert torch.equal(value.bfloat16().float(), value) and torch.equal(value.half().float(), value), name
        assert value.shape == (artifact.raw(name).shape if name in scales else value.shape)
        assert name not in scales or (value >= 2**-14).all()
    derive(tmp_path / "start", tmp_path / "trained", overlay, {})
    trained = Artifact(tmp_path / "trained")
    assert set(trained.stored()) == set(artifact.stored()) | biases
    for name in artifact.formats:
        assert torch.equal(trained.quantized(name).codes, artifact.quantized(name).codes)
        assert (f"{name}.bias" in trained.names()) == (name.split(".", 3)[3] in slots)


def test_a_bias_outside_the_slots_stays_as_it_was(tmp_path: Path) -> None:
    config = config_of("llama")
    artifact = make(tmp_path, config, biases=ALL)
    student = student_of(config, artifact, ("bias",), {"mlp.up_proj"})
    assert set(student.overlay()) == {f"model.layers.{i}.mlp.up_proj.bias" for i in range(2)}
    with torch.no_grad():
        assert torch.equal(logits(student), dense(config, artifact)(IDS).logits)


def test_linears_that_the_scheme_skips_are_the_artifacts_own(tmp_path: Path) -> None:
    config = config_of("qwen2")
    scheme = {**SCHEMES["int4"], "skip": ["lm_head", "model.layers.0.*", "*.q_proj"]}
    artifact = make(tmp_path / "start", config, scheme, QKV)
    student = student_of(config, artifact, ("bias", "scale"))
    assert set(student.linears) == {n for n in artifact.formats if ".1." in n and "q_proj" not in n} != set()
    shake(student)
    derive(tmp_path / "start", tmp_path / "trained", student.overlay(), {})
    with torch.no_grad():
        assert torch.equal(logits(student), dense(config, Artifact(tmp_path / "trained"))(IDS).logits)


@pytest.mark.parametrize("tied", [False, True])
def test_ends_are_the_teachers_tensors_and_not_trained(tmp_path: Path, tied: bool) -> None:
    config = config_of("llama", tie_word_embeddings=tied)
    student = student_of(config, make(tmp_path, config), ("bias",))
    for path in ("model.embed_tokens", "model.norm", "lm_head"):
        assert student.root.get_submodule(path) is student.teacher.root.get_submodule(path)
    with student.ends():
        hidden = run_blocks(student, IDS)
        student.logits(hidden).sum().backward()
    student.pull()
    assert student.delta["bias"].grad.abs().sum() > 0
    assert [n for n, p in student.root.named_parameters() if p.requires_grad or p.grad is not None] == []
    assert [n for n, p in student.teacher.root.named_parameters() if p.requires_grad or p.grad is not None] == []


def test_the_bias_unit_is_the_size_of_the_outputs(tmp_path: Path) -> None:
    config, slots = config_of("llama"), ("self_attn.o_proj", "mlp.up_proj")
    artifact = make(tmp_path, config)
    student = student_of(config, artifact, ("bias",), slots)
    reference, outputs = dense(config, artifact), {}
    names = [f"model.layers.{i}.{slot}" for i in range(2) for slot in slots]
    for name in names:
        reference.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: outputs.update({name: output})
        )
    with torch.no_grad():
        reference(IDS)
    units = student.parts["bias"].views(starts.output_units(student, IDS), by_row=True)
    assert set(units) == set(names)
    for name in names:
        channels = []
        for channel in outputs[name].unbind(-1):
            values = [v**2 for window in channel.tolist() for v in window[1:]]  # the first token is a sink
            channels.append((sum(values) / len(values)) ** 0.5)
        expected = torch.full((len(channels),), sum(channels) / len(channels))
        assert torch.allclose(units[name], expected, rtol=1e-4)
    assert not any(module._forward_hooks for module in student.root.modules())


def test_a_bias_past_float16_is_not_exported(tmp_path: Path) -> None:
    config = config_of("llama")
    student = student_of(config, make(tmp_path, config), ("bias",))
    student.delta["bias"].data[3] = 1e6
    with pytest.raises(ValueError, match=r"_proj.bias was trained past 65504"):
        student.overlay()


class RoundedCache(DynamicCache):
    """transformers' own cache, of which keys and values come back in fp8."""

    def __init__(self, artifact: Artifact) -> None:
        super().__init__()
        self.artifact = artifact

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        stored = super().update(keys, values, layer, *args, **kwargs)
        found = []
        for x, part in zip(stored, "kv", strict=True):
            scale = self.artifact.raw(f"model.layers.{layer}.self_attn.{part}_scale")
            found.append((x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale)
        return found[0], found[1]


@pytest.mark.parametrize("scheme", ["int4", "fp8-tensor"])
def test_a_quantized_cache_counts_in_training(tmp_path: Path, scheme: str) -> None:
    config = config_of("llama")
    artifact = make(tmp_path / "a", config, SCHEMES[scheme] | {"kv_cache": KV_CACHE})
    student, reference = student_of(config, artifact, ("bias",)), dense(config, artifact)
    with torch.no_grad():
        theirs = reference(IDS, cache=RoundedCache(artifact)).logits
        assert torch.equal(logits(student), theirs)
        assert not torch.allclose(reference(IDS).logits, theirs, atol=1e-3)
