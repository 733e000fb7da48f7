"""ModelOpt FP8, per tensor with static activations: one directory that vLLM and TensorRT-LLM both load.

    X.weight float8_e4m3fn [N, K]      X.weight_scale, X.input_scale float32 []      W = weight * weight_scale

TensorRT-LLM obeys hf_quant_config.json, vLLM the same facts in config.json.
"""

from __future__ import annotations

from pathlib import Path

import torch

from export._layers import Layer, check_kinds, check_shared_scales, layers
from export._writer import Lazy, write_checkpoint, write_json
from export.carrier import Carrier
from qat.artifact import Artifact

VERSION = 1
HOLDS = {"fp8-tensor"}
MIXED_GROUPS = False


def check(artifact: Artifact, carrier: Carrier) -> None:
    """Raise ValueError for a layer that the format has no place for."""
    found = layers(artifact)
    check_kinds("modelopt", found, HOLDS, MIXED_GROUPS)
    check_shared_scales("modelopt", artifact, found, carrier.arch)


def write(artifact: Artifact, out: Path, carrier: Carrier, shard_bytes: int) -> None:
    """Write the checkpoint into the folder `out`."""
    check(artifact, carrier)
    producer, excluded = {"name": "tare", "version": str(VERSION)}, carrier.unquantized(artifact.formats)
    inline = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "ignore": excluded,
        "kv_cache_scheme": None,
        "producer": producer,
    }
    write_checkpoint(artifact, out, carrier, shard_bytes, _parts, inline)
    legacy = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": excluded}
    write_json({"producer": producer, "quantization": legacy}, out / "hf_quant_config.json")


def _parts(artifact: Artifact, layer: Layer, dtype: torch.dtype) -> dict[str, Lazy]:
    name = layer.name
    return {
        "weight": Lazy(torch.float8_e4m3fn, (layer.rows, layer.columns), lambda: artifact.raw(f"{name}.codes")),
        "weight_scale": Lazy(torch.float32, (), lambda: artifact.raw(f"{name}.scale").view(())),
        "input_scale": Lazy(torch.float32, (), lambda: artifact.raw(f"{name}.input_scale").view(())),
    }
