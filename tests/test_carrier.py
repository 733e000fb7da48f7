"""Which class carries a bias, and that relabelling changes nothing that is computed, tokenized or generated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PretrainedConfig

from export.carrier import carrier, trainable_biases
from export.stage import run
from qat.arch import arch_of
from qat.model import Model
from tests.artifacts import ALL, config_of, make

QKV = frozenset({"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"})
MLP = frozenset({"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"})
SLIDING: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
YARN = {"rope_type": "yarn", "rope_theta": 7e4, "factor": 4.0, "original_max_position_embeddings": 64}


def slots(config: PretrainedConfig, *engines: str) -> tuple[frozenset[str], str]:
    return trainable_biases(arch_of(config), config, engines)


def test_all_seven_where_the_graph_is_llamas() -> None:
    for family in ("llama", "qwen2", "mistral"):
        for engines in (["vllm"], ["trtllm"], ["transformers"], ["vllm", "trtllm", "transformers"]):
            assert slots(config_of(family), *engines) == (ALL, "")


def test_what_a_sliding_window_leaves() -> None:
    found, why = slots(config_of("qwen2", **SLIDING), "vllm", "trtllm")
    assert found == QKV
    assert "self_attn.o_proj, mlp.gate_proj" in why and "vllm" in why and "use_sliding_window is True" in why
    assert slots(config_of("qwen2", **SLIDING), "trtllm")[0] == QKV | MLP
    assert slots(config_of("mistral", sliding_window=32), "vllm") == (ALL, "")
    found, why = slots(config_of("mistral", sliding_window=32), "vllm", "trtllm")
    assert (
        found == frozenset() and "trtllm would drop them in MistralForCausalLM" in why and "sliding_window is 32" in why
    )


def carry(config: PretrainedConfig, engines: list[str], biased: frozenset[str]) -> tuple[str, frozenset[str]]:
    found = carrier(arch_of(config), config, engines, biased)
    assert found.config["architectures"] == [found.arch.class_name]
    return found.arch.class_name, found.biases


def test_the_parents_class_is_kept_while_it_loads_every_bias() -> None:
    assert carry(config_of("llama"), ["vllm"], frozenset()) == ("LlamaForCausalLM", frozenset())
    assert carry(config_of("llama"), ["vllm"], frozenset({"mlp.up_proj"})) == ("LlamaForCausalLM", MLP)
    assert carry(config_of("llama"), ["vllm"], frozenset({"self_attn.o_proj"})) == ("LlamaForCausalLM", ALL - MLP)
    assert carry(config_of("llama", attention_bias=True), ["vllm"], QKV) == ("LlamaForCausalLM", ALL - MLP)
    assert carry(config_of("qwen2"), ["vllm"], QKV) == ("Qwen2ForCausalLM", QKV)
    assert carry(config_of("mistral"), ["trtllm"], frozenset()) == ("MistralForCausalLM", frozenset())


def test_vllm_adds_no_zeros_to_q_k_and_v() -> None:
    """Its Llama obeys `qkv_bias`; transformers does not know it and reads all four, so all four are stored."""
    output = frozenset({"self_attn.o_proj"})
    for family in ("llama", "mistral"):
        config = config_of(family)
        for biased, engines, said in (
            (output | MLP, ["vllm"], False), (output, ["vllm", "trtllm"], False), (output | QKV, ["vllm"], None),
            (output | {"self_attn.k_proj"}, ["vllm"], None), (MLP, ["vllm"], None), (output, ["trtllm"], None),
        ):  # fmt: skip
            found = carrier(arch_of(config), config, engines, biased)
            assert found.config.get("qkv_bias") is said
            assert found.biases == (ALL - MLP if biased - MLP else frozenset()) | (MLP & biased)
    parent = config_of("llama", attention_bias=True, qkv_bias=False)
    assert "qkv_bias" not in carrier(arch_of(parent), parent, ["vllm"], output | QKV).config


def test_relabelled_where_it_does_not() -> None:
    assert carry(config_of("qwen2"), ["vllm"], QKV | {"mlp.up_proj"}) == ("LlamaForCausalLM", ALL)
    assert carry(config_of("qwen2"), ["vllm"], QKV | {"self_attn.o_proj"}) == ("LlamaForCausalLM", ALL - MLP)
    assert carry(config_of("mistral"), ["vllm"], frozenset({"mlp.up_proj"})) == ("LlamaForCausalLM", MLP)
    # with a window only vLLM's own Mistral has the slots
    sliding = config_of("mistral", sliding_window=32)
    assert carry(sliding, ["vllm"], frozenset({"mlp.up_proj"})) == ("MistralForCausalLM", MLP)
    assert carrier(arch_of(sliding), sliding, ["vllm"], MLP).config["mlp_bias"] is True


def test_a_bias_that_no_class_loads_is_refused() -> None:
    config = config_of("qwen2", **SLIDING)
    with pytest.raises(ValueError) as error:
        carry(config, ["vllm", "trtllm"], QKV | {"self_attn.o_proj"})
    for word in ("self_attn.o_proj of Qwen2ForCausalLM", "vllm", "llama: use_sliding_window is True", "train.learn"):
        assert word in str(error.value)
    assert "q_proj" not in str(error.value)
    with pytest.raises(ValueError, match=r"which biases trtllm_legacy loads for Qwen3ForCausalLM .*qat/arch"):
        carry(config_of("qwen3"), ["trtllm_legacy"], ALL)
    with pytest.raises(ValueError, match=r"there is no export/engines/other\.py"):
        carry(config_of("llama"), ["other"], ALL)


def relabelled(tmp_path: Path, family: str, **changes: Any) -> tuple[Path, Path]:
    """(artifact, dense export of it) with a bias on o and up in the first block."""
    config = config_of(family, **changes)
    make(tmp_path / "artifact", config, "int4", frozenset({"self_attn.o_proj", "mlp.up_proj"}))
    return tmp_path / "artifact", run(tmp_path / "artifact", ["dense"], ["vllm"], 10**9, tmp_path / "out")["dense"]


CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True, "bos_token_id": None, "rope_parameters": YARN}),
    ("mistral", {"head_dim": 32}),
    ("mistral", {"tie_word_embeddings": True, "pad_token_id": None, "attention_dropout": 0.1}),
]


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_a_relabelled_model_computes_the_same(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    from qat.artifact import Artifact

    source, folder = relabelled(tmp_path, family, **changes)
    parent, written = AutoConfig.from_pretrained(source), AutoConfig.from_pretrained(folder)
    assert (parent.model_type, written.model_type) == (family, "llama")
    free = {"architectures", "model_type", "_name_or_path", "dtype", "transformers_version"}
    ours, theirs = written.to_dict(), parent.to_dict()
    shared = (ours.keys() & theirs.keys()) - free
    assert {"head_dim", "rope_parameters", "eos_token_id"} - shared <= {"head_dim"}  # Qwen2 derives it
    assert {key: ours[key] for key in shared} == {key: theirs[key] for key in shared}
    # on disk nothing is left to a default
    on_disk = json.loads((folder / "config.json").read_text())
    assert set(type(written).default_config_fields()) - free - {"id2label", "label2id"} <= set(on_disk) | set(PLAIN)

    # the parent's own graph, with the biases added to it
    artifact = Artifact(source)
    model = Model(parent, artifact, resident=True)
    ids = torch.arange(4, 84)[None]
    with torch.no_grad(), model.ends():
        hidden = model.embed(ids)
        for index in range(len(model.blocks)):
            model.load_block(index)
            hidden = model.run_block(index, hidden)
        expected = model.logits(hidden)
        found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")(ids)
    assert torch.equal(found.logits, expected)


PLAIN = PretrainedConfig().to_dict()  # fields of no model in particular


@pytest.mark.parametrize("declared", [None, "Qwen2Tokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_tokenizer_and_generation_stay_the_same(tmp_path: Path, family: str, declared: str | None) -> None:
    source = tmp_path / "artifact"
    make(source, config_of(family), "int4", frozenset({"self_attn.o_proj"}))
    file = source / "tokenizer_config.json"
    fields = json.loads(file.read_text())
    fields.pop("tokenizer_class")
    file.write_text(json.dumps(fields | ({"tokenizer_class": declared} if declared else {})))
    folder = run(source, ["awq"], ["vllm"], 10**9, tmp_path / "out")["awq"]
    before, after = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(folder)
    assert before.backend_tokenizer.to_str() == after.backend_tokenizer.to_str()
    assert before("the cat sat")["input_ids"] == after("the cat sat")["input_ids"]
    assert (before.bos_token_id, before.eos_token_id) == (after.bos_token_id, after.eos_token_id)
    ours, theirs = GenerationConfig.from_pretrained(folder), GenerationConfig.from_pretrained(source)
    assert ours.to_dict() == theirs.to_dict() and ours.eos_token_id == [2, 3]


def test_config_serves_old_readers_and_hides_this_machine(tmp_path: Path) -> None:
    _, folder = relabelled(tmp_path, "qwen2", rope_parameters=YARN)
    config = json.loads((folder / "config.json").read_text())
    assert config["torch_dtype"] == config["dtype"]
    assert config["rope_theta"] == 7e4 and config["rope_scaling"]["rope_type"] == "yarn"
    assert "_name_or_path" not in config and "sliding_window" not in config
    assert (
        AutoConfig.from_pretrained(folder).rope_parameters
        == AutoConfig.from_pretrained(tmp_path / "artifact").rope_parameters
    )


def test_serving_dtype() -> None:
    config = config_of("llama", dtype="float32")
    arch = arch_of(config)
    assert carrier(arch, config, ["vllm"], set()).dtype == torch.bfloat16
    assert carrier(arch, config, ["vllm"], set(), "float16").dtype == torch.float16
    assert carrier(arch, config_of("llama", dtype="float16"), ["vllm"], set()).dtype == torch.float16
    with pytest.raises(ValueError, match=r"model.dtype 'float32'.*bfloat16 or float16"):
        carrier(arch, config, ["vllm"], set(), "float32")


def test_biases_are_stored_in_the_serving_dtype(tmp_path: Path) -> None:
    make(tmp_path / "a", config_of("llama"), "int4", ALL)
    folder = run(tmp_path / "a", ["gptq"], ["vllm"], 10**9, tmp_path / "out", dtype="float16")["gptq"]
    assert load_file(folder / "model.safetensors")["model.layers.1.mlp.up_proj.bias"].dtype == torch.float16
