"""Exports of every architecture: names and configs as engines look them up, and the same weights in Hugging Face."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import calibrate.observe
from calibrate.range.max import Options as RangeOptions
from export.carrier import carrier, trainable_biases
from export.stage import run
from gate import lint
from qat import plugins
from qat.arch import arch_of
from qat.artifact import Artifact, derive
from qat.checkpoint import SafetensorsFolder
from qat.coverage import loads
from qat.model import Model
from qat.parent import Parent
from qat.scheme import Scheme, Section
from qat.sections import Train
from qat.student import Student, run_blocks
from tests.artifacts import SCHEMES, config_of, make
from tests.test_model import FAMILIES, IDS, logits

NEW: dict[str, dict[str, Any]] = {
    name: FAMILIES[name][1]
    for name in ("qwen3", "gemma3", "phi3", "phi3-long", "mixtral", "qwen3-moe", "qwen3-moe-dense-first")
}
ENGINES = ("vllm", "trtllm", "transformers")
QKV = frozenset({"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"})
O = frozenset({"self_attn.o_proj"})  # noqa: E741
MLP = frozenset({"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"})


def tiny(name: str, **more: Any) -> Any:
    return config_of(FAMILIES[name][0], **NEW[name] | more)


def export(folder: Path, name: str, form: str, scheme: Any = "int4", engines: Any = ENGINES, biased: Any = ()) -> Path:
    make(folder / "artifact", tiny(name), scheme, frozenset(biased))
    return run(folder / "artifact", [form], engines, 10**9, folder / "out")[form]


@pytest.mark.parametrize("name", NEW)
def test_hugging_face_computes_the_same_from_a_dense_export(tmp_path: Path, name: str) -> None:
    folder = export(tmp_path, name, "dense")
    artifact = Artifact(tmp_path / "artifact")
    own = json.loads((folder / "config.json").read_text())
    how = {"experts_implementation": "eager"} if "num_local_experts" in own else {}
    theirs, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **how)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert lint.check(folder, ENGINES, artifact) == []
    config = AutoConfig.from_pretrained(tmp_path / "artifact")
    with torch.no_grad():
        assert torch.equal(logits(Model(config, artifact)), theirs(IDS).logits)
        assert torch.equal(logits(Model(theirs.config, SafetensorsFolder(folder))), theirs(IDS).logits)
    written, parent = theirs.config.to_dict(), config.to_dict()
    free = ("_name_or_path", "dtype", "transformers_version")
    assert {k: written[k] for k in parent if k not in free} == {k: v for k, v in parent.items() if k not in free}


PAIRS = [
    (name, form, kind)
    for name in ("qwen3", "gemma3", "phi3", "mixtral", "qwen3-moe-dense-first")
    for form in plugins.names("export.formats")
    for kind in ("int4", "fp8-channel", "fp8-tensor")
    if kind in plugins.literal("export.formats", form, "HOLDS")
    and form != "dense"
    and (form, kind) != ("modelopt", "int4")
]


@pytest.mark.parametrize(("name", "form", "kind"), PAIRS)
def test_the_gate_finds_no_fault(tmp_path: Path, name: str, form: str, kind: str) -> None:
    biased = QKV if name.startswith("qwen3") else {"self_attn.o_proj"} if name == "gemma3" else ()
    engines = ("vllm",) if name == "gemma3" else ENGINES
    folder = export(tmp_path, name, form, kind, engines, biased)
    loading = [engine for engine in engines if loads(engine, form, {kind})]
    assert lint.check(folder, loading, Artifact(tmp_path / "artifact")) == []


def vllm_places(name: str, gate_up_down: tuple[str, str, str]) -> tuple[str, int, str] | None:
    """(parameter of the fused layer, expert, slot) of a stored tensor, by vLLM's make_expert_params_mapping."""
    gate, up, down = gate_up_down
    for parameter, slot, weight in (("w13_", "w1", gate), ("w2_", "w2", down), ("w13_", "w3", up)):
        found = re.search(rf"experts\.(\d+)\.{weight}\.", name)
        if found:
            return f"experts.{parameter}{name[found.end() :]}", int(found[1]), slot
    return None


# parameters that vLLM's MoE methods create, without w13_ and w2_ (auto_awq.py, auto_gptq.py, compressed_tensors_moe_*)
REGISTERED = {
    ("awq", "int4"): {"qweight", "scales", "qzeros"},
    ("gptq", "int4"): {"qweight", "scales", "qzeros", "g_idx"},
    ("compressed_tensors", "int4"): {"weight_packed", "weight_scale", "weight_shape"},
    ("compressed_tensors", "fp8-channel"): {"weight", "weight_scale"},
    ("compressed_tensors", "fp8-tensor"): {"weight", "weight_scale", "input_scale"},
    ("modelopt", "fp8-tensor"): {"weight", "weight_scale", "input_scale"},
    ("dense", "int4"): {"weight"},
}


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "qwen3-moe-dense-first"])
@pytest.mark.parametrize(("form", "kind"), REGISTERED)
def test_every_tensor_of_an_expert_has_its_place_in_vllm(tmp_path: Path, name: str, form: str, kind: str) -> None:
    folder = export(tmp_path, name, form, kind)
    stored = SafetensorsFolder(folder).names()
    names = ("w1", "w3", "w2") if name == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    layer = {"mixtral": "block_sparse_moe"}.get(name, "mlp")
    for block in {"qwen3-moe-dense-first": [1]}.get(name, [0, 1]):
        prefix = f"model.layers.{block}.{layer}."
        places = [vllm_places(n, names) for n in stored if n.startswith(prefix + "experts.")]
        wanted = {
            (f"experts.{'w2_' if slot == 'w2' else 'w13_'}{part}", expert, slot)
            for part in REGISTERED[form, kind]
            for expert in range(4)
            for slot in ("w1", "w2", "w3")
        }
        assert set(places) == wanted and len(places) == len(wanted)
        assert prefix + "gate.weight" in stored  # the router, as it was
    dense = [n for n in stored if n.startswith("model.layers.0.mlp.")]
    assert name != "qwen3-moe-dense-first" or {n.split(".")[4] for n in dense} == {"gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe-dense-first"])
def test_routers_and_skipped_experts_are_listed(tmp_path: Path, name: str) -> None:
    arch = arch_of(tiny(name))
    scheme = {"weights": {"dtype": "int4", "group_size": 32}, "skip": ["lm_head", "*layers.1*experts*"]}
    folder = export(tmp_path, name, "awq", scheme)
    listed = json.loads((folder / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    experts = [n for n in arch.block_linears(1) if ".experts." in n]
    assert len(experts) == 12
    routers = arch.block_routers(0) + arch.block_routers(1)
    assert set(listed) == {*experts, *routers, f"model.layers.1.{arch.experts}", "lm_head"}
    assert lint.check(folder, ["vllm", "transformers"], Artifact(tmp_path / "artifact")) == []


def test_what_vllm_cannot_take_of_experts_is_refused(tmp_path: Path) -> None:
    some = {"weights": {"dtype": "int4", "group_size": 32}, "skip": ["lm_head", "*experts.1.w2"]}
    with pytest.raises(ValueError, match=r"layers\.0\.block_sparse_moe\.experts\.1\.w2 is not quantized.* as one"):
        export(tmp_path / "a", "mixtral", "awq", some)
    with pytest.raises(ValueError, match=r"experts\.0\.w1 is int4.*symmetric only\. Export awq"):
        export(tmp_path / "b", "mixtral", "compressed_tensors", "int4-asym")
    make(tmp_path / "e" / "artifact", tiny("mixtral"), "fp8-tensor")
    expert = "model.layers.1.block_sparse_moe.experts"
    double = {f"{expert}.2.{w}.input_scale": torch.full((1, 1), 0.125) for w in ("w1", "w3")}
    derive(tmp_path / "e" / "artifact", tmp_path / "e" / "other", double, {})
    with pytest.raises(
        ValueError, match=r"the input_scale of .*experts\.\d\.w. is .*experts\.2\.w. is 0\.125: engines"
    ):
        run(tmp_path / "e" / "other", ["modelopt"], ENGINES, 10**9, tmp_path / "e" / "out")
    mixed = {"weights": {"dtype": "int4", "group_size": 32}, "overrides": {"*self_attn*": {"dtype": "int4"}}}
    with pytest.raises(ValueError, match=r"experts of MixtralForCausalLM \(w1, w3, w2\) by name.*awq or gptq"):
        export(tmp_path / "c", "mixtral", "compressed_tensors", mixed)
    export(tmp_path / "d", "qwen3-moe", "compressed_tensors", mixed)


BIASES = [  # family, engines, what can be learned
    ("qwen3", ["vllm"], QKV),
    ("qwen3", ["vllm", "trtllm"], QKV),
    ("qwen3", ["trtllm"], QKV | O | MLP),
    ("qwen3-moe-dense-first", ["vllm"], QKV),
    ("qwen3-moe", ["trtllm"], QKV | O),
    ("gemma3", ["vllm"], QKV | O),
    ("gemma3", ["trtllm"], MLP),
    ("gemma3", ["vllm", "trtllm"], frozenset()),
    ("phi3", ["vllm"], {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"}),
    ("phi3", ["vllm", "trtllm"], frozenset()),
    ("mixtral", ["vllm"], frozenset()),
]


@pytest.mark.parametrize(("name", "engines", "slots"), BIASES)
def test_only_biases_that_every_engine_loads_are_learned(name: str, engines: list[str], slots: Any) -> None:
    config = tiny(name)
    found, why = trainable_biases(arch_of(config), config, engines)
    assert found == slots
    assert bool(why) == (set(slots) != set(arch_of(config).linears)) and not re.search(r"experts\.\d", why)
    written = carrier(arch_of(config), config, engines, slots)
    assert written.biases >= set(slots) and not written.relabelled
    with pytest.raises(ValueError, match=r"there are biases on .*would drop them"):
        carrier(arch_of(config), config, ["vllm", "trtllm"], set(arch_of(config).linears))


def test_a_bias_that_only_hugging_face_declares_is_written_as_zeros(tmp_path: Path) -> None:
    folder = export(tmp_path, "qwen3", "dense", "int4", ["vllm"], QKV)
    tensors = SafetensorsFolder(folder)
    assert json.loads((folder / "config.json").read_text())["attention_bias"] is True
    assert not tensors.get("model.layers.0.self_attn.o_proj.bias").any()
    assert tensors.get("model.layers.0.self_attn.q_proj.bias").any()
    assert "model.layers.1.self_attn.v_proj.bias" in tensors.names()
    assert lint.check(folder, ["vllm", "transformers"]) == []
    # a number in it would be lost in vLLM: the gate says so
    make(tmp_path / "other", tiny("qwen3", attention_bias=True), "int4", QKV | O)
    out = run(tmp_path / "other", ["dense"], ["transformers"], 10**9, tmp_path / "hf")["dense"]
    lost = {("bias_dropped", f"model.layers.{block}.self_attn.o_proj.bias") for block in range(2)}
    assert {(fault.kind, fault.where) for fault in lint.check(out, ["vllm"])} == lost


def test_configs_have_the_fields_that_engines_on_transformers_4_read(tmp_path: Path) -> None:
    def written(name: str) -> dict[str, Any]:
        return json.loads((export(tmp_path / name, name, "dense") / "config.json").read_text())

    gemma = written("gemma3")
    assert (gemma["rope_theta"], gemma["rope_local_base_freq"]) == (54321.0, 321.0)
    assert gemma["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert (gemma["sliding_window"], gemma["head_dim"], gemma["architectures"]) == (7, 32, ["Gemma3ForCausalLM"])
    phi = written("phi3-long")
    assert phi["attention_bias"] is False and phi["partial_rotary_factor"] == 0.4  # TensorRT-LLM reads the flag
    assert phi["rope_scaling"]["long_factor"] == [3.0, 4.0, 5.0] and phi["original_max_position_embeddings"] == 16
    moe = written("qwen3-moe-dense-first")
    assert moe["num_experts"] == 4 and moe["mlp_only_layers"] == [0] and moe["norm_topk_prob"] is False
    assert written("mixtral")["num_local_experts"] == 4


class Chosen:
    def __init__(self, name: str, options: Section) -> None:
        self.name, self.options = name, options


@pytest.mark.parametrize("name", NEW)
def test_calibrated_block_by_block_under_the_same_names(tmp_path: Path, name: str) -> None:
    from tests.test_model import save_random

    save_random(tmp_path / "parent", name)
    parent = Parent(tmp_path / "parent", "tiny")
    methods = {
        "transform": Chosen("none", Section()),
        "range": Chosen("max", RangeOptions()),
        "round": Chosen("nearest", Section()),
    }
    scheme = Scheme.model_validate(SCHEMES["int4"])
    calibrate.observe.run(parent.config, parent.tensors, scheme, IDS, methods, parent.folder, tmp_path / "artifact")
    artifact = Artifact(tmp_path / "artifact")
    assert sorted(artifact.names()) == sorted(parent.tensors.names())
    assert set(artifact.formats) == {n for block in range(2) for n in parent.arch.block_linears(block)}
    for router in parent.arch.block_routers(1):
        assert torch.equal(artifact.get(f"{router}.weight"), parent.tensors.get(f"{router}.weight"))
    for linear in artifact.formats:  # nearest, in steps of amax / 7.5 that are themselves rounded to 8 bits
        weight = parent.tensors.get(f"{linear}.weight").float().view(-1, 32)
        error = (artifact.get(f"{linear}.weight").view(-1, 32) - weight).abs().amax(1)
        assert (error <= weight.abs().amax(1) / 7.5 * 0.55).all()


@pytest.mark.parametrize("name", NEW)
def test_training_runs_what_is_exported(tmp_path: Path, name: str) -> None:
    artifact = make(tmp_path / "artifact", tiny(name))
    config = AutoConfig.from_pretrained(artifact.path)
    student = Student(Model(config, artifact, resident=True), artifact, Train(learn=["scale"]).learn, ())
    student.refresh()
    with torch.no_grad(), student.ends():
        trained = student.logits(run_blocks(student, IDS))
    assert torch.equal(trained, logits(Model(config, artifact)))
