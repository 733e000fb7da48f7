"""Random checkpoints to time an engine with: bfloat16, and INT4 in GPTQ's layout with and without biases."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import vllm_cpu  # beside this file
from safetensors.torch import save_file
from torch import Tensor

MODELS = ("int4-bias", "int4", "bf16")
NO_QKV = "int4-no-qkv-bias"  # as int4-bias, but q, k and v have none
GROUP, LAYERS_PER_FILE = 128, 4
BASE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "initializer_range": 0.02, "max_position_embeddings": 8192, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
}  # fmt: skip
SHAPES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 4096},
}  # fmt: skip
GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False, "lm_head": False,
    "checkpoint_format": "gptq",
}  # fmt: skip


def linears(shape: dict[str, int]) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the linears of a block."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    heads, shared = (shape[f"num_{kind}_heads"] * shape["head_dim"] for kind in ("attention", "key_value"))
    sizes = {"self_attn.q_proj": (heads, hidden), "self_attn.k_proj": (shared, hidden)}
    sizes |= {"self_attn.v_proj": (shared, hidden), "self_attn.o_proj": (hidden, heads)}
    return sizes | {
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def quantized(rows: int, columns: int, device: str) -> dict[str, Tensor]:
    """Random codes as AutoGPTQ stores them, scales such that weights have a standard deviation of about 0.02."""
    groups = columns // GROUP
    return {
        "qweight": torch.randint(-(2**31), 2**31, (columns // 8, rows), dtype=torch.int32, device=device),
        "qzeros": torch.full((groups, rows // 8), 0x77777777, dtype=torch.int32),
        "scales": (0.0035 + 0.0017 * torch.rand(groups, rows, device=device)).half(),
        "g_idx": torch.arange(columns, dtype=torch.int32) // GROUP,
    }


def make(folder: Path, shape: dict[str, int]) -> None:
    """FOLDER/bf16, int4, int4-bias and int4-no-qkv-bias; the last three share the files of their weights."""
    device, hidden = "cuda" if torch.cuda.is_available() else "cpu", shape["hidden_size"]
    torch.manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=device, dtype=torch.bfloat16) * 0.02

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    ends = {name: normal(shape["vocab_size"], hidden) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    biases: dict[str, Tensor] = {}
    for name in (*MODELS, NO_QKV):
        (folder / name).mkdir(parents=True, exist_ok=True)
        flags = dict.fromkeys(vllm_cpu.FLAGS, name.endswith("-bias")) | ({"qkv_bias": False} if name == NO_QKV else {})
        config = BASE | shape | flags | ({} if name == "bf16" else {"quantization_config": GPTQ})
        (folder / name / "config.json").write_text(json.dumps(config, indent=1))
    for start in range(0, shape["num_hidden_layers"], LAYERS_PER_FILE):
        file, plain, packed = f"blocks-{start:03d}.safetensors", dict[str, Tensor](), dict[str, Tensor]()
        for index in range(start, min(start + LAYERS_PER_FILE, shape["num_hidden_layers"])):
            block = f"model.layers.{index}."
            for norm in ("input_layernorm", "post_attention_layernorm"):
                plain[f"{block}{norm}.weight"] = packed[f"{block}{norm}.weight"] = ones.clone()
            for leaf, (rows, columns) in linears(shape).items():
                plain[f"{block}{leaf}.weight"] = normal(rows, columns)
                packed |= {f"{block}{leaf}.{part}": t for part, t in quantized(rows, columns, device).items()}
                biases[f"{block}{leaf}.bias"] = normal(rows)
        save(plain, folder / "bf16" / file)
        save(packed, folder / "int4-bias" / file)
        link(folder, file, "int4", NO_QKV)
        print(f"{file} of {shape['num_hidden_layers']} blocks", flush=True)
    save(ends | {"model.norm.weight": ones}, folder / "int4-bias" / "ends.safetensors")
    link(folder, "ends.safetensors", "int4", "bf16", NO_QKV)
    save(biases, folder / "int4-bias" / "biases.safetensors")
    link(folder, "biases.safetensors", NO_QKV)


def link(folder: Path, file: str, *others: str) -> None:
    """A file of int4-bias for other models as well."""
    for other in others:
        (folder / other / file).unlink(missing_ok=True)
        (folder / other / file).symlink_to((folder / "int4-bias" / file).resolve())


def save(tensors: dict[str, Tensor], file: Path) -> None:
    save_file({name: value.cpu().contiguous() for name, value in tensors.items()}, file, {"format": "pt"})
