"""TensorRT-LLM up to 1.2, whose engines `trtllm-build` makes of a checkpoint of its own; later versions have none.

The checkpoint is the gated `modelopt` directory under other names (documented in TensorRT-LLM's checkpoint.md, and as
Model-Optimizer's export_tensorrt_llm_checkpoint writes it), in trtllm_checkpoint/ of the release:

    rank0.safetensors   q, k and v as one: attention.qkv; gate_proj is mlp.fc, up_proj mlp.gate; biases alike
        W4A16_AWQ       X.weight int8 [N / 2, K], X.weights_scaling_factor float32 [N, K / g], X.prequant_scaling_factor
                        [K], ones
        FP8             X.weight float8_e4m3fn [N, K], X.weights_scaling_factor, X.activation_scaling_factor float32 [1]
    config.json         the model's sizes and the quantization, for one rank
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from export._writer import Lazy, write_json, write_safetensors
from export.engines import trtllm
from qat.arch import Arch
from qat.checkpoint import SafetensorsFolder
from qat.coverage import Layer

VERSION = 1
PROGRAM = "trtllm-serve"
LOADS = {"modelopt": {"int4", "fp8-tensor"}}
KV_CACHE: set[str] = set()
BUILD = "trtllm-build"
CHECKPOINT = "trtllm_checkpoint"
SCRIPT = "serve/trtllm_legacy.sh"
RENAMED = {  # linears of a block, those that it holds as one
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.dense": ("self_attn.o_proj",),
    "mlp.fc": ("mlp.gate_proj",),
    "mlp.gate": ("mlp.up_proj",),
    "mlp.proj": ("mlp.down_proj",),
}
NORMS = {"input_layernorm": "input_layernorm", "post_layernorm": "post_attention_layernorm"}


def check(format_name: str, found: Sequence[Layer], arch: Arch) -> None:
    """Raise ValueError for layers that it would not build in this format."""
    trtllm.check(format_name, found, arch)
    if arch.class_name != "LlamaForCausalLM":
        raise ValueError(
            f"{arch.class_name} is not written for trtllm_legacy, which knows Llama (and what is relabelled to it, "
            "when it has biases); leave it out of export.engines, or use trtllm"
        )


def note() -> str:
    """What became of the engine on this machine."""
    if shutil.which(BUILD):
        return "Built here, and not started."
    return f"NOT RUN HERE: there was no {BUILD} on the PATH, so the engine was neither built nor started."


def launch(directory_name: str, config: dict[str, Any]) -> dict[str, str]:
    """Files by path that build the engine and serve it. directory_name: of the checkpoint. config: of the export."""
    length = config["max_position_embeddings"]
    script = f"""#!/bin/sh
# Serve {directory_name} with TensorRT-LLM 1.2 or older: OpenAI-compatible API on port 8000. Arguments are passed on.
# {note()} The engine is built into trtllm_engine/ when that is not there, for this machine's GPU alone.
# BUILD=only  build, and do not serve
# CONTEXT=N   longest sequence in tokens; by default what the model was made for ({length})
# BATCH=N     most sequences at once; 64 by default
cd "$(dirname "$0")/.." || exit 1
[ -f trtllm_engine/config.json ] || {BUILD} --checkpoint_dir {CHECKPOINT} --output_dir trtllm_engine \\
  --gemm_plugin auto --kv_cache_type paged --context_fmha enable --remove_input_padding enable \\
  --max_batch_size "${{BATCH:-64}}" --max_num_tokens 8192 --max_seq_len "${{CONTEXT:-{length}}}" || exit 1
[ "$BUILD" != only ] || exit 0
exec trtllm-serve trtllm_engine --tokenizer . --host 0.0.0.0 --port 8000 "$@"
"""
    return {SCRIPT: script}


def prepare(directory: Path) -> None:
    """Write trtllm_checkpoint/ beside a released directory's files, and build the engine where the program is.

    Raises ValueError when the program fails.
    """
    out = directory / CHECKPOINT
    out.mkdir(exist_ok=True)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    write_safetensors(tensors(SafetensorsFolder(directory), config), out / "rank0.safetensors")
    write_json(config_of(config), out / "config.json")
    if shutil.which(BUILD):
        words = [str((directory / SCRIPT).resolve())]
        done = subprocess.run(["env", "BUILD=only", *words], capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"{BUILD} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:].strip()}")


def config_of(config: dict[str, Any]) -> dict[str, Any]:
    """config.json of the checkpoint, from that of the modelopt directory."""
    q, heads = config["quantization_config"], config["num_attention_heads"]
    kept = ("group_size", "has_zero_point", "pre_quant_scale")
    scaling = config["rope_scaling"]
    return {
        "producer": q["producer"],
        "architecture": "LlamaForCausalLM",
        "dtype": config["dtype"],
        "logits_dtype": "float32",
        **{f"num_{what}": config[f"num_{what}"] for what in ("hidden_layers", "attention_heads", "key_value_heads")},
        **{size: config[size] for size in ("hidden_size", "intermediate_size", "vocab_size", "hidden_act")},
        "head_size": config.get("head_dim") or config["hidden_size"] // heads,
        "norm_epsilon": config["rms_norm_eps"],
        "max_position_embeddings": config["max_position_embeddings"],
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": config["rope_theta"],
        "rotary_scaling": scaling and {"type": scaling["rope_type"], **scaling},  # it was called so then
        "attn_bias": config["attention_bias"],
        "mlp_bias": config["mlp_bias"],
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "share_embedding_table": False,
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
        "quantization": {
            "quant_algo": q["quant_algo"],
            "kv_cache_quant_algo": None,
            **{key: q[key] for key in kept if key in q},
            "exclude_modules": ["lm_head"],
        },
    }


def tensors(files: SafetensorsFolder, config: dict[str, Any]) -> dict[str, Lazy]:
    """Every tensor of rank0.safetensors, one in memory at a time. files: of the modelopt directory."""
    dtype, is_fp8 = getattr(torch, config["dtype"]), config["quantization_config"]["quant_algo"] == "FP8"
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"

    def rows_of(names: Sequence[str], as_dtype: torch.dtype) -> Lazy:
        """Tensors below each other; codes are taken for what they are, 16-bit ones cast to the serving dtype."""
        shapes = [files.shape(name) for name in names]
        whole = (sum(shape[0] for shape in shapes), *shapes[0][1:]) if len(names) > 1 else shapes[0]
        return Lazy(as_dtype, whole, partial(_joined, files, names, as_dtype))

    def scalar(name: str) -> Lazy:
        return Lazy(torch.float32, (1,), lambda: files.get(name).float().view(1))

    plain = {"vocab_embedding": "model.embed_tokens.weight", "ln_f": "model.norm.weight"}
    found = {f"transformer.{name}.weight": rows_of([source], dtype) for name, source in plain.items()}
    found["lm_head.weight"] = rows_of([head], dtype)
    for index in range(config["num_hidden_layers"]):
        block, layer = f"model.layers.{index}", f"transformer.layers.{index}"
        for name, source in NORMS.items():
            found[f"{layer}.{name}.weight"] = rows_of([f"{block}.{source}.weight"], dtype)
        for name, leaves in RENAMED.items():
            linears, here = [f"{block}.{leaf}" for leaf in leaves], f"{layer}.{name}"
            if config["attention_bias" if name.startswith("attention") else "mlp_bias"]:
                found[f"{here}.bias"] = rows_of([f"{linear}.bias" for linear in linears], dtype)
            weights = [f"{linear}.weight" for linear in linears]
            if is_fp8:  # scales are the same in linears that are fused
                found[f"{here}.weight"] = rows_of(weights, torch.float8_e4m3fn)
                found[f"{here}.weights_scaling_factor"] = scalar(f"{linears[0]}.weight_scale")
                found[f"{here}.activation_scaling_factor"] = scalar(f"{linears[0]}.input_scale")
                continue
            found[f"{here}.weight"] = rows_of(weights, torch.int8)
            scales = [f"{linear}.weight_scale" for linear in linears]
            found[f"{here}.weights_scaling_factor"] = rows_of(scales, torch.float32)
            inputs = files.shape(weights[0])[1:]
            found[f"{here}.prequant_scaling_factor"] = Lazy(dtype, inputs, partial(torch.ones, inputs, dtype=dtype))
    return found


def _joined(files: SafetensorsFolder, names: Sequence[str], dtype: torch.dtype) -> Tensor:
    parts = [files.get(name) for name in names]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole.view(dtype) if dtype == torch.int8 else whole.to(dtype)
