"""TensorRT-LLM's own checkpoint: names, dtypes and shapes as Model-Optimizer 0.47 writes them, read by a slow loop."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from export.engines import trtllm_legacy
from export.engines._serve_command import command
from export.release import release
from export.stage import run
from gate import lint
from qat.artifact import Artifact
from qat.report import plain
from tests.artifacts import ALL, SCHEMES, config_of, make

SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_key_value_heads": 2}
KINDS: dict[str, dict[str, Any]] = {
    "int4": {"weights": {"dtype": "int4", "group_size": 128}},
    "fp8-tensor": SCHEMES["fp8-tensor"],
}
ROWS = {"attention.qkv": 512, "attention.dense": 256, "mlp.fc": 384, "mlp.gate": 384, "mlp.proj": 256}
SOURCES = {  # of each linear, top to bottom
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.dense": ("self_attn.o_proj",),
    "mlp.fc": ("mlp.gate_proj",),
    "mlp.gate": ("mlp.up_proj",),
    "mlp.proj": ("mlp.down_proj",),
}


def export(tmp_path: Path, kind: str, biases: frozenset[str] = ALL, **more: Any) -> tuple[Artifact, Path]:
    config = config_of("llama", **(SIZES | more))
    artifact = make(tmp_path / "artifact", config, KINDS[kind], biases)
    folder = run(artifact.path, ["modelopt"], ["trtllm_legacy"], 10**9, tmp_path / "out")["modelopt"]
    assert lint.check(folder, ["trtllm_legacy"], artifact) == []
    for path, text in trtllm_legacy.launch("tiny", json.loads((folder / "config.json").read_text())).items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
        (folder / path).chmod(0o755)
    trtllm_legacy.prepare(folder)
    return artifact, folder


def expected(kind: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """What Model-Optimizer's export_tensorrt_llm_checkpoint writes for a Llama of this size with biases."""
    bf16, f32 = torch.bfloat16, torch.float32
    found = {name: (bf16, (128, 256)) for name in ("transformer.vocab_embedding.weight", "lm_head.weight")}
    found["transformer.ln_f.weight"] = (bf16, (256,))
    for index in range(2):
        layer = f"transformer.layers.{index}"
        found |= {f"{layer}.{norm}.weight": (bf16, (256,)) for norm in ("input_layernorm", "post_layernorm")}
        for name, rows in ROWS.items():
            columns = 384 if name == "mlp.proj" else 256
            parts: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {"bias": (bf16, (rows,))}
            if kind == "int4":
                parts |= {
                    "weight": (torch.int8, (rows // 2, columns)),
                    "weights_scaling_factor": (f32, (rows, columns // 128)),
                    "prequant_scaling_factor": (bf16, (columns,)),
                }
            else:
                parts["weight"] = (torch.float8_e4m3fn, (rows, columns))
                parts |= {f"{of}_scaling_factor": (f32, (1,)) for of in ("weights", "activation")}
            found |= {f"{layer}.{name}.{part}": spec for part, spec in parts.items()}
    return found


def dequantized(stored: dict[str, Tensor], name: str, kind: str) -> Tensor:
    """The float32 weight of a linear, element by element for int4: signed nibbles, the even row in the low one."""
    weight, scale = stored[f"{name}.weight"], stored[f"{name}.weights_scaling_factor"]
    if kind != "int4":
        return weight.float() * scale
    assert (stored[f"{name}.prequant_scaling_factor"] == 1).all()
    values = torch.empty(2 * weight.shape[0], weight.shape[1])
    for row, packed in enumerate(weight.tolist()):
        for column, byte in enumerate(packed):
            for half, nibble in enumerate((byte & 15, (byte >> 4) & 15)):
                signed = nibble - 16 if nibble > 7 else nibble
                values[2 * row + half, column] = signed * scale[2 * row + half, column // 128]
    return values


@pytest.mark.parametrize("kind", KINDS)
def test_the_checkpoint_holds_the_trained_model_in_the_documented_layout(tmp_path: Path, kind: str) -> None:
    artifact, folder = export(tmp_path, kind)
    stored = load_file(folder / "trtllm_checkpoint/rank0.safetensors")
    assert {name: (t.dtype, tuple(t.shape)) for name, t in stored.items()} == expected(kind)
    for name, leaves in SOURCES.items():
        linears = [f"model.layers.0.{leaf}" for leaf in leaves]
        weight = torch.cat([artifact.get(f"{linear}.weight").float() for linear in linears])
        assert torch.equal(dequantized(stored, f"transformer.layers.0.{name}", kind), weight)
        bias = torch.cat([artifact.get(f"{linear}.bias") for linear in linears])
        assert torch.equal(stored[f"transformer.layers.0.{name}.bias"].float(), bias.float()) and bias.any()
        if kind == "fp8-tensor":
            ours = artifact.raw(f"{linears[0]}.input_scale").view(1)
            assert torch.equal(stored[f"transformer.layers.0.{name}.activation_scaling_factor"], ours)
    config = json.loads((folder / "trtllm_checkpoint/config.json").read_text())
    assert {key: config[key] for key in ("architecture", "dtype", "head_size", "attn_bias", "mlp_bias")} == {
        "architecture": "LlamaForCausalLM", "dtype": "bfloat16", "head_size": 64, "attn_bias": True, "mlp_bias": True,
    }  # fmt: skip
    assert (config["rotary_base"], config["rotary_scaling"], config["norm_epsilon"]) == (54321.0, None, 3e-5)
    assert config["mapping"] == {"world_size": 1, "tp_size": 1, "pp_size": 1}
    groups = {"group_size": 128, "has_zero_point": False, "pre_quant_scale": True} if kind == "int4" else {}
    assert config["quantization"] == {
        "quant_algo": "W4A16_AWQ" if kind == "int4" else "FP8", "kv_cache_quant_algo": None,
        "exclude_modules": ["lm_head"], **groups,
    }  # fmt: skip


def test_a_tied_head_is_written_out_and_no_bias_is_declared_without_one(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 64}
    _, folder = export(tmp_path, "fp8-tensor", biases=frozenset(), tie_word_embeddings=True, rope_parameters=rope)
    stored = load_file(folder / "trtllm_checkpoint/rank0.safetensors")
    assert torch.equal(stored["lm_head.weight"], stored["transformer.vocab_embedding.weight"])
    assert not any(name.endswith("bias") for name in stored)
    config = json.loads((folder / "trtllm_checkpoint/config.json").read_text())
    assert (config["attn_bias"], config["mlp_bias"], config["rotary_scaling"]["type"]) == (False, False, "llama3")


def test_the_engine_is_built_where_the_program_is_and_the_script_says_so_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "without").mkdir()
    _, folder = export(tmp_path / "without", "int4")
    assert "NOT RUN HERE" in (folder / trtllm_legacy.SCRIPT).read_text()
    build = tmp_path / "bin" / "trtllm-build"
    build.parent.mkdir()
    write = '#!/bin/sh\nmkdir trtllm_engine && echo "$@" > trtllm_engine/config.json\n'
    for text, fails in ((write, False), ("#!/bin/sh\necho no such GPU >&2; exit 3\n", True)):
        build.write_text(text)
        build.chmod(0o755)
        monkeypatch.setenv("PATH", f"{build.parent}:{os.environ['PATH']}")
        if fails:
            with pytest.raises(ValueError, match="trtllm-build ended with 1: no such GPU"):
                export(tmp_path / "failing", "int4")
            continue
        _, folder = export(tmp_path / "with", "int4")
        words = (folder / "trtllm_engine/config.json").read_text().split()
        assert words[:4] == ["--checkpoint_dir", "trtllm_checkpoint", "--output_dir", "trtllm_engine"]
        assert words[words.index("--max_seq_len") + 1] == "256"
        script = (folder / trtllm_legacy.SCRIPT).read_text()
        assert "Built here" in script and "NOT RUN HERE" not in script
    (build.parent / "trtllm-serve").write_text("#!/bin/sh\n")
    (build.parent / "trtllm-serve").chmod(0o755)
    assert "Built here, and not started" in trtllm_legacy.note()
    assert command(folder, None, []) == [str((folder / trtllm_legacy.SCRIPT).resolve())]


def test_card_and_run_say_that_the_engine_was_not_built(tmp_path: Path) -> None:
    _, folder = export(tmp_path, "int4")
    row = {"state": "modelopt", "perplexity": 9.0, "kl": 0.1, "top1": 0.9, "bits_per_weight": 4.2, "size_on_disk": 1}
    row |= {"increase": -1e-6, "increase_low": None, "increase_high": None, "kl_low": None, "kl_high": None}
    named = {"name": "none"}
    facts = {
        **{"base_model": "tiny", "revision": None, "license": None, "scheme": "int4-g128", "format": "modelopt"},
        **{"calibrate": {"range": named, "round": named, "transform": named}, "trainings": [], "confidence": 0.99},
        "evaluation": {**dict.fromkeys(("num_tokens", "num_windows", "length"), 1), "source": "a.txt"}
        | {"dtype": "float32", "device": "cpu"},
        **{"rows": [row], "tasks": [], "data": {}},
    }
    (note,) = release(folder, tmp_path / "release", "tiny", ["trtllm_legacy"], facts)
    assert note.startswith("trtllm_legacy: NOT RUN HERE: there was no trtllm-build on the PATH")
    card = (tmp_path / "release/README.md").read_text()
    assert plain(note) in card.splitlines() and "perplexity +0.00% against" in card  # no -0.00%


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_other_architectures_are_refused(tmp_path: Path, family: str) -> None:
    artifact = make(tmp_path / "artifact", config_of(family, **SIZES), KINDS["fp8-tensor"])
    with pytest.raises(ValueError, match="trtllm_legacy"):
        run(artifact.path, ["modelopt"], ["trtllm_legacy"], 10**9, tmp_path / "out")
