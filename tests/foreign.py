"""Checkpoint directories as other tools write them, by compressed-tensors itself and by loops from documented layouts.

AutoAWQ's GEMM layout, Model-Optimizer's `export_hf_checkpoint`, llm-compressor's presets; and the headers of a large
directory over files full of holes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from qat.checkpoint import INDEX

BLOCK = 128
SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 96, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
LINEARS = [
    f"model.layers.{i}.{'mlp' if leaf in MLP else 'self_attn'}.{leaf}" for i in (0, 1) for leaf in ATTENTION + MLP
]


def model_of(folder: Path, dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(dtype)
    model.save_pretrained(folder)
    return model


def rewrite(folder: Path, parts: Callable[[str, Tensor], dict[str, Tensor]], quantization: dict[str, Any]) -> Path:
    """Replace the weight of every linear of the decoder blocks."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in LINEARS:
        weight = tensors.pop(f"{name}.weight").float()
        tensors |= {f"{name}.{part}": value.contiguous() for part, value in parts(name, weight).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return folder


def autoawq(folder: Path) -> Path:
    """WQLinear_GEMM.from_linear after pseudo_quantize_tensor with zero points, 4 bits, groups of 128, float16."""
    model_of(folder, torch.float16)

    def words(values: Tensor) -> Tensor:
        out = torch.zeros(len(values), values.shape[1] // 8, dtype=torch.int32)
        for column in range(out.shape[1]):
            for i, place in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
                out[:, column] |= values[:, column * 8 + place].int() << (i * 4)
        return out

    def parts(name: str, weight: Tensor) -> dict[str, Tensor]:
        groups = weight.view(len(weight), -1, 128)
        low, high = groups.amin(-1), groups.amax(-1)
        scales = ((high - low).clamp(min=1e-5) / 15).half()
        zeros = (-torch.round(low / scales.float())).clamp(0, 15)
        codes = torch.round(groups / scales.float()[..., None] + zeros[..., None]).clamp(0, 15).flatten(1)
        return {"qweight": words(codes.T), "qzeros": words(zeros.T), "scales": scales.T}

    config = {
        "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": None,
    }  # fmt: skip
    return rewrite(folder, parts, config)


def static() -> dict[str, Tensor]:
    return {"input_scale": torch.tensor(0.02)}


def modelopt(folder: Path, algorithm: str, cache: bool = False) -> Path:
    """Model-Optimizer 0.47's `export_hf_checkpoint`: names, shapes, dtypes, and its int4 codes in steps of amax / 7."""
    model_of(folder)

    def parts(name: str, weight: Tensor) -> dict[str, Tensor]:
        rows, columns = weight.shape
        leaf = name.rpartition(".")[2]
        kv = {f"{leaf[0]}_scale": torch.tensor(0.01)} if cache and leaf in ("k_proj", "v_proj") else {}
        if algorithm == "FP8":
            scale = torch.tensor(0.9 / 448)  # unified within what is fused
            return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale} | static() | kv
        if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
            scale = weight.abs().amax(1) / 448
            return {"weight": (weight / scale[:, None]).to(torch.float8_e4m3fn), "weight_scale": scale}
        if algorithm == "FP8_PB_WO":
            blocks = weight.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
            scale = blocks.abs().amax((1, 3), keepdim=True) / 448
            return {"weight": (blocks / scale).view(rows, columns).to(torch.float8_e4m3fn), "weight_scale": scale}
        groups = weight.view(rows, -1, 128)
        scale = groups.abs().amax(-1) / 7
        codes = torch.round(groups / scale[..., None]).clamp(-8, 7).view(rows, columns).to(torch.int8)
        packed = torch.zeros(rows // 2, columns, dtype=torch.uint8)
        for row in range(rows // 2):
            packed[row] = ((codes[2 * row + 1] & 15) << 4 | codes[2 * row] & 15).to(torch.uint8)
        out = {"weight": packed, "weight_scale": scale}
        if leaf in ("o_proj", "down_proj"):
            out["pre_quant_scale"] = torch.linspace(0.5, 2, columns).bfloat16()
        if algorithm == "W4A8_AWQ":
            out |= {"weight_scale_2": torch.tensor(0.9 / 448)} | static()
        return out

    legacy = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8" if cache else None, "exclude_modules": ["lm_head"]}
    inline = {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "ignore": ["lm_head"],
        "producer": {"name": "modelopt"},
    }
    if algorithm.startswith("W4A"):
        legacy |= {"group_size": 128, "has_zero_point": False, "pre_quant_scale": True}
    if cache:
        inline["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": legacy}))
    return rewrite(folder, parts, inline)


GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
TOKEN = {"strategy": "token", "dynamic": True}
RECIPES: dict[str, dict[str, Any]] = {  # llm-compressor's presets
    "W4A16": {"weights": GROUP},
    "W4A16-static-order": {"weights": GROUP | {"actorder": "static"}},
    "W4A16-asym": {"weights": GROUP | {"symmetric": False}},
    "W8A16": {"weights": INT8 | {"strategy": "channel"}},
    "W8A8": {"weights": INT8 | {"strategy": "channel"}, "input_activations": INT8 | TOKEN},
    "FP8_DYNAMIC": {"weights": FLOAT8 | {"strategy": "channel"}, "input_activations": FLOAT8 | TOKEN},
    "FP8_BLOCK": {
        "weights": FLOAT8 | {"strategy": "block", "block_structure": [BLOCK, BLOCK]},
        "input_activations": FLOAT8 | {"strategy": "group", "group_size": 128, "dynamic": True},
    },
}  # fmt: skip


def compressed(folder: Path, recipe: str) -> Path:
    """What compressed-tensors, which is llm-compressor's writer, makes of a model and random scales."""
    model = model_of(folder)
    groups = {"group_0": {"targets": ["Linear"], **RECIPES[recipe]}}
    apply_quantization_config(
        model, QuantizationConfig.model_validate({"config_groups": groups, "ignore": ["lm_head"]})
    )
    for module in model.modules():
        if not hasattr(module, "weight_scale"):
            continue
        module.weight_scale.data.copy_(torch.rand_like(module.weight_scale.float()) * 0.01 + 0.01)
        if hasattr(module, "weight_zero_point") and not module.quantization_scheme.weights.symmetric:
            module.weight_zero_point.data.random_(-8, 8)
        module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return folder


DIRECTORIES: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "AutoAWQ": (autoawq, ("vllm",)),
    "ModelOpt FP8": (lambda f: modelopt(f, "FP8"), ("vllm", "trtllm")),
    "ModelOpt FP8 with cache": (lambda f: modelopt(f, "FP8", True), ("vllm", "trtllm")),
    "ModelOpt FP8 rows": (lambda f: modelopt(f, "FP8_PER_CHANNEL_PER_TOKEN"), ("vllm", "trtllm")),
    "ModelOpt FP8 blocks": (lambda f: modelopt(f, "FP8_PB_WO"), ("vllm", "trtllm")),
    "ModelOpt W4A16": (lambda f: modelopt(f, "W4A16_AWQ"), ("trtllm",)),
    "ModelOpt W4A8": (lambda f: modelopt(f, "W4A8_AWQ"), ("trtllm",)),
}  # fmt: skip
DIRECTORIES |= {
    f"llm-compressor {r}": (lambda f, r=r: compressed(f, r), ("vllm",) + (("trtllm",) if r == "FP8_BLOCK" else ()))
    for r in RECIPES
}


def big(folder: Path, layers: int, shards: int) -> Path:
    """A directory in the shape of a 70B model whose files are headers over holes."""
    folder.mkdir()
    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=layers, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128256, dtype="float16", architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    sizes = {"q_proj": (8192, 8192), "k_proj": (1024, 8192), "v_proj": (1024, 8192), "o_proj": (8192, 8192)}
    sizes |= {"gate_proj": (28672, 8192), "up_proj": (28672, 8192), "down_proj": (8192, 28672)}
    tensors: dict[str, tuple[str, list[int]]] = {
        "model.embed_tokens.weight": ("F16", [128256, 8192]), "lm_head.weight": ("F16", [128256, 8192]),
        "model.norm.weight": ("F16", [8192]),
    }  # fmt: skip
    for index in range(layers):
        prefix = f"model.layers.{index}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = ("F16", [8192])
        for leaf, (n, k) in sizes.items():
            name = f"{prefix}.{'mlp' if leaf in MLP else 'self_attn'}.{leaf}"
            tensors |= {f"{name}.qweight": ("I32", [k, n // 8]), f"{name}.qzeros": ("I32", [k // 128, n // 8])}
            tensors[f"{name}.scales"] = ("F16", [k // 128, n])
    names, place = list(tensors), {}
    for shard in range(shards):
        file, header, end = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors", {}, 0
        for name in names[shard::shards]:
            dtype, shape = tensors[name]
            start, end = end, end + math.prod(shape) * (2 if dtype == "F16" else 4)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
            place[name] = file
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            f.truncate(8 + len(text) + end)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": place}))
    awq = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "modules_to_not_convert": ["lm_head"],
    }
    stored = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stored | {"quantization_config": awq}))
    return folder
