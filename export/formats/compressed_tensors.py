"""compressed-tensors, vLLM's own format: pack-quantized int4 and int8, int-quantized w8a8, float-quantized fp8 E4M3.

    int4   X.weight_packed int32 [N, K / 8]       X.weight_scale [N, K / g] in the serving dtype
           X.weight_shape  int64 [2] = N, K       asymmetric: X.weight_zero_point int32 [N / 8, K / g]
    int8   the same with X.weight_packed int32 [N, K / 4]
    w8a8   X.weight int8 [N, K]                   X.weight_scale float32 [N, 1]
    fp8    X.weight float8_e4m3fn [N, K]          X.weight_scale float32 [N, 1] per channel, [1] per tensor,
                                                  [ceil N / 128, ceil K / 128] in blocks
                                                  static activations: X.input_scale float32 [1]
    fp8 KV cache   A.k_scale, A.v_scale float32 [1] of each attention A

Each weight-only linear may have its own dtype and group size. `actorder` is left out: engines refuse it or ignore it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from export import _pack
from export._layers import check_kinds, check_shared_scales, layers
from export._shapes import check_multiples
from export._writer import Lazy, exactly, write_checkpoint
from export.carrier import Carrier
from qat.artifact import Artifact
from qat.coverage import Layer
from qat.scheme import BLOCK, TensorFormat

VERSION = 2
HOLDS = {"int4", "int4-asym", "int8", "w8a8", "fp8-channel", "fp8-tensor", "fp8-block"}
MIXED_GROUPS = True
KV_CACHE = True


def check(artifact: Artifact, carrier: Carrier) -> None:
    """Raise ValueError for a layer that the format has no place for."""
    found = layers(artifact)
    check_kinds("compressed_tensors", found, HOLDS, MIXED_GROUPS)
    for layer in found:
        if is_packed(layer):
            check_multiples(f"compressed_tensors {layer.kind}", [layer], columns=32 // layer.fmt.bits)
    check_multiples("compressed_tensors int4-asym", [layer for layer in found if layer.kind == "int4-asym"], rows=8)
    check_shared_scales("compressed_tensors", artifact, found, carrier.arch)


def write(artifact: Artifact, out: Path, carrier: Carrier, shard_bytes: int) -> None:
    """Write the checkpoint into the folder `out`."""
    check(artifact, carrier)
    write_checkpoint(artifact, out, carrier, shard_bytes, _parts, quantization_config(artifact, carrier))


def quantization_config(artifact: Artifact, carrier: Carrier) -> dict[str, Any]:
    """What goes into config.json; valid for compressed_tensors' own QuantizationConfig."""
    by_format: dict[TensorFormat, list[str]] = {}
    for layer in layers(artifact):
        by_format.setdefault(layer.fmt, []).append(layer.name)
    # a class name among several groups would win over exact names where engines fuse linears
    targets = [["Linear"]] if len(by_format) == 1 else list(by_format.values())
    first = layers(artifact)[0]  # formats that mix are all packed
    stored_as = "float-quantized" if not first.fmt.is_int else "pack-quantized" if is_packed(first) else "int-quantized"
    return {
        "quant_method": "compressed-tensors",
        "format": stored_as,
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": {
                "targets": names,
                "weights": _arguments(fmt),
                "input_activations": _arguments(artifact.scheme.inputs) if artifact.scheme.inputs else None,
                "output_activations": None,
            }
            for i, (fmt, names) in enumerate(zip(by_format, targets, strict=True))
        },
        "ignore": carrier.unquantized(artifact.formats),
        "kv_cache_scheme": _arguments(artifact.scheme.kv_cache) if artifact.scheme.kv_cache else None,
    }


def is_packed(layer: Layer) -> bool:
    """Whether codes lie in 32-bit words: weights of integers beside activations that are left alone."""
    return layer.fmt.is_int and layer.inputs is None


def _arguments(fmt: TensorFormat) -> dict[str, Any]:
    """The library's QuantizationArgs."""
    return {
        "type": "int" if fmt.is_int else "float",
        "num_bits": fmt.bits,
        "symmetric": fmt.symmetric,
        "strategy": fmt.per,
        "group_size": fmt.group_size,
        "block_structure": [BLOCK, BLOCK] if fmt.per == "block" else None,
        "dynamic": fmt.dynamic,
    }


def _parts(artifact: Artifact, layer: Layer, dtype: torch.dtype) -> dict[str, Lazy]:
    return (_packed_parts if is_packed(layer) else _plain_parts)(artifact, layer, dtype)


def _packed_parts(artifact: Artifact, layer: Layer, dtype: torch.dtype) -> dict[str, Lazy]:
    name, rows, columns, groups = layer.name, layer.rows, layer.columns, layer.groups

    def packed() -> torch.Tensor:
        return _pack.compressed_codes(artifact.raw(f"{name}.codes"))

    def scale() -> torch.Tensor:
        return exactly(artifact.raw(f"{name}.scale"), dtype, f"{name}.scale")

    def zeros() -> torch.Tensor:
        return _pack.compressed_zeros(artifact.raw(f"{name}.zero"))

    parts = {
        "weight_packed": Lazy(torch.int32, (rows, columns * layer.fmt.bits // 32), packed),
        "weight_scale": Lazy(dtype, (rows, groups), scale),
        "weight_shape": Lazy(torch.int64, (2,), lambda: torch.tensor([rows, columns])),
    }
    if not layer.fmt.symmetric:
        parts["weight_zero_point"] = Lazy(torch.int32, (rows // 8, groups), zeros)
    return parts


def _plain_parts(artifact: Artifact, layer: Layer, dtype: torch.dtype) -> dict[str, Lazy]:
    name, codes = layer.name, torch.int8 if layer.fmt.is_int else torch.float8_e4m3fn
    shape: tuple[int, ...] = layer.fmt.scale_shape(layer.rows, layer.columns)
    if layer.fmt.per == "tensor":
        shape = (1,)
    parts = {
        "weight": Lazy(codes, (layer.rows, layer.columns), lambda: artifact.raw(f"{name}.codes")),
        "weight_scale": Lazy(torch.float32, shape, lambda: artifact.raw(f"{name}.scale").view(shape)),
    }
    if layer.fmt.per == "tensor":
        parts["input_scale"] = Lazy(torch.float32, (1,), lambda: artifact.raw(f"{name}.input_scale").view(1))
    return parts
