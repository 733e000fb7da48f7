"""Tiny artifacts with random codes, for tests of what comes after calibration."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    Gemma3TextConfig,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from qat.arch import arch_of
from qat.artifact import REST, Artifact, block_file, block_tensors, save_tensors, write_meta
from qat.model import skeleton
from qat.quant import FP8_MAX, Quantized, scale_to_grid, to_grid
from qat.scheme import Scheme, TensorFormat

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": 0,
    "rms_norm_eps": 3e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 54321.0},
    "dtype": "bfloat16",
}
CONFIGS: dict[str, type[PretrainedConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma3_text": Gemma3TextConfig,
    "phi3": Phi3Config,
    "mixtral": MixtralConfig,
    "qwen3_moe": Qwen3MoeConfig,
}
# where a family needs more than SIZES; heads are wider than hidden_size / num_attention_heads where they may be
OF_FAMILY: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen3": {"head_dim": 32},
    "gemma3_text": {
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 321.0},
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 54321.0},
        },
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32},
}
SCHEMES: dict[str, dict[str, Any]] = {
    "int4": {"weights": {"dtype": "int4", "group_size": 32}},
    "int4-channel": {"weights": {"dtype": "int4"}},
    "int4-asym": {"weights": {"dtype": "int4", "group_size": 32, "symmetric": False}},
    "int8": {"weights": {"dtype": "int8", "group_size": 32}},
    "w8a8": {"weights": {"dtype": "int8"}, "inputs": {"dtype": "int8", "per": "token", "dynamic": True}},
    "fp8-channel": {
        "weights": {"dtype": "fp8_e4m3"},
        "inputs": {"dtype": "fp8_e4m3", "per": "token", "dynamic": True},
    },
    "fp8-tensor": {
        "weights": {"dtype": "fp8_e4m3", "per": "tensor"},
        "inputs": {"dtype": "fp8_e4m3", "per": "tensor"},
    },
    "fp8-block": {
        "weights": {"dtype": "fp8_e4m3", "per": "block"},
        "inputs": {"dtype": "fp8_e4m3", "per": "group", "group_size": 128, "dynamic": True},
    },
}
WIDE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}  # whole blocks, for engines
KV_CACHE = {"dtype": "fp8_e4m3", "per": "tensor"}
ALL = frozenset(arch_of(LlamaConfig()).linears)


def config_of(family: str, **changes: Any) -> PretrainedConfig:
    """A tiny config of one of CONFIGS; `mistral` without a sliding window."""
    return CONFIGS[family](**SIZES | OF_FAMILY.get(family, {}) | changes)


def make(
    folder: Path,
    config: PretrainedConfig,
    scheme: str | dict[str, Any] = "int4",
    biases: frozenset[str] = frozenset(),
    seed: int = 0,
) -> Artifact:
    """A complete artifact in `folder`. biases: linears, relative to a block, that have one in the first block only."""
    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    parsed = Scheme.model_validate(SCHEMES[scheme] if isinstance(scheme, str) else scheme)
    arch = arch_of(config)
    shapes = {name: p.shape for name, p in skeleton(copy.deepcopy(config)).named_parameters()}
    plain = {n: torch.randn(s, generator=random).mul(0.3).bfloat16() for n, s in shapes.items()}
    plain |= {name: value.abs() + 0.5 for name, value in plain.items() if "norm" in name}
    linears = {}
    for block in range(config.num_hidden_layers):
        prefix = f"{arch.blocks}.{block}."
        stored = {name: plain.pop(name) for name in list(plain) if name.startswith(prefix)}
        static_of: dict[str, Tensor] = {}
        for names in arch.one_input_scale(block):
            static_of |= dict.fromkeys(names, torch.rand(1, 1, generator=random) * 0.01 + 1e-4)
        for group in arch.at(block).shared_input:
            # per-tensor scales are shared by linears that read the same input
            scale = torch.rand(1, generator=random)[0] * 0.01 + 1e-4
            for leaf in group:
                name, fmt = prefix + leaf, parsed.format_of(prefix + leaf)
                if leaf in biases and block == 0:
                    stored[f"{name}.bias"] = to_grid(torch.randn(shapes[f"{name}.weight"][0], generator=random))
                if fmt is None:
                    continue
                linears[name] = fmt
                rows, columns = stored.pop(f"{name}.weight").shape
                q = _random(rows, columns, fmt, scale, random)
                is_static = parsed.inputs is not None and not parsed.inputs.dynamic
                static = static_of[name].clone() if is_static else None
                stored |= block_tensors(name, q, static, None)
        if parsed.kv_cache is not None:
            keys, values = torch.rand(2, 1, generator=random) * 0.01 + 1e-3
            stored |= {f"{prefix}self_attn.k_scale": keys.clone(), f"{prefix}self_attn.v_scale": values.clone()}
        save_tensors(stored, folder / block_file(block))
    save_tensors(plain, folder / REST)
    write_meta(folder, parsed, linears, {})
    config.architectures = [arch.class_name]
    config.save_pretrained(folder)
    GenerationConfig(eos_token_id=[2, 3], temperature=0.7, do_sample=True).save_pretrained(folder)
    save_tokenizer(folder)
    (folder / "LICENSE").write_text("licence of the parent\n")
    return Artifact(folder)


def _random(rows: int, columns: int, fmt: TensorFormat, scale: Tensor, random: torch.Generator) -> Quantized:
    shape = fmt.scale_shape(rows, columns)
    if fmt.dtype == "fp8_e4m3":
        codes = (torch.randn(rows, columns, generator=random) * 100).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        own = torch.rand(shape, generator=random) * 0.01 + 1e-4
        return Quantized(codes, scale.view(1, 1).clone() if fmt.per == "tensor" else own)
    if fmt.dtype == "int8":
        codes = torch.randint(-128, 128, (rows, columns), generator=random, dtype=torch.int8)
        return Quantized(codes, scale_to_grid(torch.rand(shape, generator=random) * 0.002 + 0.001))
    codes = torch.randint(0, 16, (rows, columns), generator=random, dtype=torch.uint8)
    zero = torch.randint(0, 16, shape, generator=random, dtype=torch.uint8)
    scales = scale_to_grid(torch.rand(shape, generator=random) * 0.05)
    return Quantized(codes, scales, None if fmt.symmetric else zero)


def save_tokenizer(folder: Path, tokenizer_class: str | None = None) -> None:
    """A word-level tokenizer; `tokenizer_class` replaces what tokenizer_config.json says."""
    words = ["<pad>", "<s>", "</s>", "<end>", "the", "cat", "sat", "[UNK]"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(folder)
