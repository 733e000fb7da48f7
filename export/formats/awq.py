"""AutoAWQ, GEMM layout: W[n, k] = (q[n, k] - z[n, k // g]) * s[n, k // g].

    X.qweight  int32 [K, N / 8]      X.qzeros  int32 [K / g, N / 8]      X.scales  float16 [K / g, N]

Symmetric weights have explicit zero points of 8 (`zero_point: true` always): without them vLLM picks a slow kernel.
Scales are float16 as AutoAWQ writes them; they lie on a grid that bfloat16 holds too.
"""

from __future__ import annotations

from pathlib import Path

import torch

from export import _pack
from export._layers import check_cache, check_kinds, layers
from export._shapes import check_multiples
from export._writer import Lazy, exactly, write_checkpoint
from export.carrier import Carrier
from qat.artifact import Artifact
from qat.coverage import Layer
from qat.quant import SYMMETRIC_ZERO

VERSION = 1
HOLDS = {"int4", "int4-asym"}
MIXED_GROUPS = False
KV_CACHE = False


def check(artifact: Artifact, carrier: Carrier) -> None:
    """Raise ValueError for a layer that the layout has no place for."""
    found = layers(artifact)
    check_kinds("awq", found, HOLDS, MIXED_GROUPS)
    check_multiples("awq", found, rows=8)
    check_cache("awq", artifact)


def write(artifact: Artifact, out: Path, carrier: Carrier, shard_bytes: int) -> None:
    """Write the checkpoint into the folder `out`."""
    check(artifact, carrier)
    group_size = next(iter(artifact.formats.values())).group_size
    quantization = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size or -1,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": carrier.unquantized(artifact.formats),
    }
    write_checkpoint(artifact, out, carrier, shard_bytes, _parts, quantization)


def _parts(artifact: Artifact, layer: Layer, dtype: torch.dtype) -> dict[str, Lazy]:
    def zeros() -> torch.Tensor:
        zero = artifact.optional(f"{layer.name}.zero")
        symmetric = torch.full((layer.rows, layer.groups), SYMMETRIC_ZERO, dtype=torch.uint8)
        return _pack.awq(symmetric if zero is None else zero)

    def scales() -> torch.Tensor:
        return exactly(artifact.raw(f"{layer.name}.scale"), torch.float16, f"{layer.name}.scale").T

    def qweight() -> torch.Tensor:
        return _pack.awq(artifact.quantized(layer.name).codes)

    return {
        "qweight": Lazy(torch.int32, (layer.columns, layer.rows // 8), qweight),
        "qzeros": Lazy(torch.int32, (layer.groups, layer.rows // 8), zeros),
        "scales": Lazy(torch.float16, (layer.groups, layer.rows), scales),
    }
