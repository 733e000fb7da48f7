"""ModelOpt's layout: fp8 for vLLM and TensorRT-LLM alike, int4 for TensorRT-LLM.

    FP8, per tensor      X.weight float8_e4m3fn [N, K]   X.weight_scale, X.input_scale float32 []
    FP8_PER_CHANNEL_PER_TOKEN
                         X.weight float8_e4m3fn [N, K]   X.weight_scale float32 [N]
    FP8_PB_WO, in blocks X.weight float8_e4m3fn [N, K]   X.weight_scale float32 [N / 128, 1, K / 128, 1]
    W4A16_AWQ            X.weight uint8 [N / 2, K]       X.weight_scale float32 [N, K / g]
                         row 2 j in the low bits of byte [j, k], row 2 j + 1 in the high ones, as -8..7
                         X.pre_quant_scale [K] in the serving dtype, ones, of linears that no engine fuses
    W4A8_AWQ             the same and X.weight_scale_2, X.input_scale float32 []
    fp8 KV cache         A.k_proj.k_scale, A.v_proj.v_scale float32 [] of each attention A

W4A16_AWQ holds any symmetric int4 codes, however they were found: a transform has been folded into norms and earlier
linears before, so no factor is left for pre_quant_scale, which TensorRT-LLM looks up all the same. It casts int4 scales
to the serving dtype, in which ours are exact. FP8_PB_WO was made for weights only; both engines run it with activations
rounded in groups of 128, found while serving. TensorRT-LLM obeys hf_quant_config.json, vLLM the same facts in
config.json.
"""

from __future__ import annotations

from pathlib import Path

import torch

from export import _pack
from export._layers import check_kinds, check_shared_scales, check_slots, layers
from export._shapes import check_multiples
from export._writer import Lazy, exactly, write_checkpoint, write_json
from export.carrier import Carrier
from qat.artifact import Artifact
from qat.coverage import Layer
from qat.quant import FP8_MAX
from qat.scheme import BLOCK

VERSION = 3
HOLDS = {"int4", "w4a8", "fp8-channel", "fp8-tensor", "fp8-block"}
MIXED_GROUPS = False
KV_CACHE = True
ALGORITHMS = {
    "int4": "W4A16_AWQ",
    "w4a8": "W4A8_AWQ",
    "fp8-channel": "FP8_PER_CHANNEL_PER_TOKEN",
    "fp8-tensor": "FP8",
    "fp8-block": "FP8_PB_WO",
}


def check(artifact: Artifact, carrier: Carrier) -> None:
    """Raise ValueError for a layer that the format has no place for."""
    check_slots("modelopt", carrier)
    found = layers(artifact)
    check_kinds("modelopt", found, HOLDS, MIXED_GROUPS)
    check_shared_scales("modelopt", artifact, found, carrier.arch)
    for layer in found:
        if layer.fmt.bits == 4:
            check_multiples(f"modelopt {layer.kind}", [layer], rows=2)
            if layer.fmt.group_size is None:
                raise ValueError(
                    f"{layer.name} is {layer.fmt}; modelopt {layer.kind} has groups: set scheme.weights.group_size to "
                    "128"
                )
    check_multiples("modelopt fp8-block", [layer for layer in found if layer.kind == "fp8-block"], BLOCK, BLOCK)


def write(artifact: Artifact, out: Path, carrier: Carrier, shard_bytes: int) -> None:
    """Write the checkpoint into the folder `out`."""
    check(artifact, carrier)
    producer, excluded = {"name": "tare", "version": str(VERSION)}, carrier.unquantized(artifact.formats)
    first = layers(artifact)[0]
    algorithm = ALGORITHMS[first.kind]
    groups = {"group_size": first.fmt.group_size, "has_zero_point": False, "pre_quant_scale": True}
    groups = groups if first.fmt.bits == 4 else {}
    has_cache = artifact.scheme.kv_cache is not None
    inline = {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "ignore": excluded,
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"} if has_cache else None,
        "producer": producer,
        **groups,
    }

    def parts(artifact: Artifact, layer: Layer, dtype: torch.dtype) -> dict[str, Lazy]:
        return _int4_parts(artifact, layer, dtype, carrier) if layer.fmt.bits == 4 else _fp8_parts(artifact, layer)

    write_checkpoint(artifact, out, carrier, shard_bytes, parts, inline, _cache)
    legacy = {
        "quant_algo": algorithm,
        "kv_cache_quant_algo": "FP8" if has_cache else None,
        "exclude_modules": excluded,
        **groups,
    }
    write_json({"producer": producer, "quantization": legacy}, out / "hf_quant_config.json")


def _fp8_parts(artifact: Artifact, layer: Layer) -> dict[str, Lazy]:
    name = layer.name
    blocks = layer.fmt.scale_shape(layer.rows, layer.columns)
    shapes: dict[str, tuple[int, ...]] = {"channel": (layer.rows,), "block": (blocks[0], 1, blocks[1], 1), "tensor": ()}
    shape = shapes[str(layer.fmt.per)]
    parts = {
        "weight": Lazy(torch.float8_e4m3fn, (layer.rows, layer.columns), lambda: artifact.raw(f"{name}.codes")),
        "weight_scale": Lazy(torch.float32, shape, lambda: artifact.raw(f"{name}.scale").view(shape)),
    }
    if layer.fmt.per == "tensor":
        parts["input_scale"] = Lazy(torch.float32, (), lambda: artifact.raw(f"{name}.input_scale").view(()))
    return parts


def _int4_parts(artifact: Artifact, layer: Layer, dtype: torch.dtype, carrier: Carrier) -> dict[str, Lazy]:
    name = layer.name

    def scale() -> torch.Tensor:
        exactly(artifact.raw(f"{name}.scale"), dtype, f"{name}.scale")
        return artifact.raw(f"{name}.scale")

    def largest() -> torch.Tensor:  # of all linears that are fused with it, as the engine asserts
        found = [artifact.get(f"{other}.weight").abs().max() for other in _fused(layer, carrier)]
        return (torch.stack(found).max() / FP8_MAX).view(())

    parts = {
        "weight": Lazy(
            torch.uint8,
            (layer.rows // 2, layer.columns),
            lambda: _pack.modelopt(artifact.quantized(name).codes),
        ),
        "weight_scale": Lazy(torch.float32, (layer.rows, layer.groups), scale),
    }
    if len(_fused(layer, carrier)) == 1:
        parts["pre_quant_scale"] = Lazy(dtype, (layer.columns,), lambda: torch.ones(layer.columns, dtype=dtype))
    if layer.kind == "w4a8":
        parts["input_scale"] = Lazy(torch.float32, (), lambda: artifact.raw(f"{name}.input_scale").view(()))
        parts["weight_scale_2"] = Lazy(torch.float32, (), largest)
    return parts


def _fused(layer: Layer, carrier: Carrier) -> list[str]:
    """Full names of the linears that an engine runs as one with this one, itself among them."""
    block, leaf = carrier.arch.split(layer.name)
    group = next(group for group in carrier.arch.shared_input if leaf in group)
    return [f"{carrier.arch.blocks}.{block}.{other}" for other in group]


def _cache(name: str) -> tuple[str, tuple[int, ...]]:
    attention, _, part = name.rpartition(".")
    return f"{attention}.{part[0]}_proj.{part}", ()
