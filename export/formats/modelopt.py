"""ModelOpt FP8: one directory that vLLM and TensorRT-LLM both load.

    per tensor, FP8        X.weight float8_e4m3fn [N, K]      X.weight_scale, X.input_scale float32 []
    in blocks, FP8_PB_WO   X.weight float8_e4m3fn [N, K]      X.weight_scale float32 [N / 128, 1, K / 128, 1]
    fp8 KV cache           A.k_proj.k_scale, A.v_proj.v_scale float32 [] of each attention A

FP8_PB_WO was made for weights only; both engines run it with activations rounded in groups of 128, found while serving.
TensorRT-LLM obeys hf_quant_config.json, vLLM the same facts in config.json.
"""

from __future__ import annotations

from pathlib import Path

import torch

from export._layers import Layer, check_kinds, check_multiples, check_shared_scales, check_slots, layers
from export._writer import Lazy, write_checkpoint, write_json
from export.carrier import Carrier
from qat.artifact import Artifact
from qat.scheme import BLOCK

VERSION = 2
HOLDS = {"fp8-tensor", "fp8-block"}
MIXED_GROUPS = False
KV_CACHE = True


def check(artifact: Artifact, carrier: Carrier) -> None:
    """Raise ValueError for a layer that the format has no place for."""
    check_slots("modelopt", carrier)
    found = layers(artifact)
    check_kinds("modelopt", found, HOLDS, MIXED_GROUPS)
    check_shared_scales("modelopt", artifact, found, carrier.arch)
    check_multiples("modelopt fp8-block", [layer for layer in found if layer.kind == "fp8-block"], BLOCK, BLOCK)


def write(artifact: Artifact, out: Path, carrier: Carrier, shard_bytes: int) -> None:
    """Write the checkpoint into the folder `out`."""
    check(artifact, carrier)
    producer, excluded = {"name": "tare", "version": str(VERSION)}, carrier.unquantized(artifact.formats)
    algorithm = {"tensor": "FP8", "block": "FP8_PB_WO"}[str(artifact.scheme.weights.per)]
    has_cache = artifact.scheme.kv_cache is not None
    inline = {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "ignore": excluded,
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"} if has_cache else None,
        "producer": producer,
    }
    write_checkpoint(artifact, out, carrier, shard_bytes, _parts, inline, _cache)
    legacy = {
        "quant_algo": algorithm,
        "kv_cache_quant_algo": "FP8" if has_cache else None,
        "exclude_modules": excluded,
    }
    write_json({"producer": producer, "quantization": legacy}, out / "hf_quant_config.json")


def _parts(artifact: Artifact, layer: Layer, dtype: torch.dtype) -> dict[str, Lazy]:
    name = layer.name
    blocks = layer.fmt.scale_shape(layer.rows, layer.columns)
    shape = (blocks[0], 1, blocks[1], 1) if layer.fmt.per == "block" else ()
    parts = {
        "weight": Lazy(torch.float8_e4m3fn, (layer.rows, layer.columns), lambda: artifact.raw(f"{name}.codes")),
        "weight_scale": Lazy(torch.float32, shape, lambda: artifact.raw(f"{name}.scale").view(shape)),
    }
    if layer.fmt.per == "tensor":
        parts["input_scale"] = Lazy(torch.float32, (), lambda: artifact.raw(f"{name}.input_scale").view(()))
    return parts


def _cache(name: str) -> tuple[str, tuple[int, ...]]:
    attention, _, part = name.rpartition(".")
    return f"{attention}.{part[0]}_proj.{part}", ()
