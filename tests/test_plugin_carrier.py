"""What is written for vLLM with tare-vllm: each linear but experts has a bias, and nothing else reads the directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from export.carrier import carrier, trainable_biases
from export.stage import run
from gate import lint
from gate.readers import open_export
from qat.arch import arch_of
from qat.artifact import Artifact
from qat.checkpoint import SafetensorsFolder
from tests.artifacts import ALL, config_of, make

PLUGIN = ["vllm_plugin"]
ATTENTION = frozenset(leaf for leaf in ALL if leaf.startswith("self_attn"))
CASES = [  # family, what can be learned, what of it is stored as comp_bias
    ("llama", ALL, frozenset()),
    ("qwen3", ALL, ALL - {f"self_attn.{x}_proj" for x in "qkv"}),
    ("gemma3_text", ALL, ALL - ATTENTION),
    ("mixtral", ATTENTION, ATTENTION),
    ("qwen3_moe", ATTENTION, frozenset({"self_attn.o_proj"})),
]


@pytest.mark.parametrize(("family", "learned", "carried"), CASES)
@pytest.mark.parametrize("form", ["awq", "gptq", "compressed_tensors"])
def test_every_bias_is_stored_and_read_back(
    tmp_path: Path, family: str, learned: frozenset[str], carried: frozenset[str], form: str
) -> None:
    config = config_of(family)
    slots, _ = trainable_biases(arch_of(config), config, PLUGIN)
    assert slots == learned
    artifact = make(tmp_path / "artifact", config, "int4", slots)
    folder = run(artifact.path, [form], PLUGIN, 10**9, tmp_path / "out")[form]
    quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
    stored = SafetensorsFolder(folder).names()
    assert {name for name in stored if name.endswith(".comp_bias")} == {
        f"model.layers.{block}.{leaf}.comp_bias" for block in range(2) for leaf in carried
    }
    if carried:
        assert quantization["quant_method"] == "tare" and set(quantization["comp_bias"]) == carried
    else:
        assert quantization["quant_method"] != "tare"
    assert lint.check(folder, PLUGIN, artifact) == []
    read = open_export(folder)
    for leaf in learned:
        name = f"model.layers.0.{leaf}.bias"
        assert torch.equal(read.get(name), artifact.get(name)) and read.get(name).any()
        assert not read.get(f"model.layers.1.{leaf}.bias").any()


def qwen3(tmp_path: Path) -> tuple[Artifact, Path]:
    artifact = make(tmp_path / "artifact", config_of("qwen3"), "int4", ALL)
    return artifact, run(artifact.path, ["awq"], PLUGIN, 10**9, tmp_path / "out")["awq"]


def test_lint_says_who_does_not_load_it(tmp_path: Path) -> None:
    _, folder = qwen3(tmp_path)
    (fault,) = lint.check(folder, ["vllm"])
    assert fault.kind == "engine" and "only vllm with tare-vllm loads it, not vllm" in str(fault)


def test_a_missing_or_unnamed_comp_bias_is_found(tmp_path: Path) -> None:
    _, folder = qwen3(tmp_path)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    listed = config["quantization_config"]["comp_bias"]
    config["quantization_config"]["comp_bias"] = [*listed, "self_attn.q_proj"]
    file.write_text(json.dumps(config))
    missing = {f"model.layers.{block}.self_attn.q_proj.comp_bias" for block in range(2)}
    assert {f.where for f in lint.check(folder, PLUGIN) if f.kind == "missing"} == missing
    config["quantization_config"]["comp_bias"] = [leaf for leaf in listed if leaf != "mlp.up_proj"]
    file.write_text(json.dumps(config))
    unknown = {f"model.layers.{block}.mlp.up_proj.comp_bias" for block in range(2)}
    assert {f.where for f in lint.check(folder, PLUGIN) if f.kind == "unexpected"} == unknown


def test_formats_and_engines_that_cannot_take_it_are_refused(tmp_path: Path) -> None:
    artifact = make(tmp_path / "artifact", config_of("qwen3"), "int4", ALL)
    with pytest.raises(ValueError, match=r"dense has no place for the biases of mlp\.down_proj.*vllm_plugin"):
        run(artifact.path, ["dense"], PLUGIN, 10**9, tmp_path / "out")
    config = AutoConfig.from_pretrained(artifact.path)
    with pytest.raises(ValueError, match=r"biases on self_attn\.o_proj.*vllm would drop them"):
        carrier(arch_of(config), config, ["vllm", "vllm_plugin"], ALL)
    with pytest.raises(ValueError, match="there are biases on mlp"):
        carrier(arch_of(config_of("mixtral")), config_of("mixtral"), PLUGIN, {"mlp.experts.0.w1"})


def test_gptq_names_skipped_experts_as_a_whole_for_vllm(tmp_path: Path) -> None:
    # vLLM asks once for model.layers.0.mlp.experts, and else looks for a kernel for int4 experts
    scheme = {"weights": {"group_size": 32}, "skip": ["lm_head", "*experts*"]}
    artifact = make(tmp_path / "artifact", config_of("qwen3_moe"), scheme)
    folder = run(artifact.path, ["gptq"], ["vllm"], 10**9, tmp_path / "out")["gptq"]
    rules = json.loads((folder / "config.json").read_text())["quantization_config"]["dynamic"]
    assert all(f"-:^model\\.layers\\.{block}\\.mlp\\.experts$" in rules for block in range(2))
    assert lint.check(folder, ["vllm"], artifact) == []
