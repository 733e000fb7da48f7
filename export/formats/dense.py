"""A plain checkpoint with the dequantized weights: runs wherever the parent runs, and saves nothing.

    X.weight [N, K] in float16 when every weight of the model is exact in it, as symmetric int4 always is, else float32

Everything else is stored as it is. config.json names float16 when that holds every tensor of the model exactly, else
float32, so that what is loaded are the quantized weights to the last bit. An fp8 or w8a8 model is dequantized in its
weights only: its activations are not rounded.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from export._layers import check_cache, check_kinds, check_slots, layers
from export._writer import Lazy, tensors, write_checkpoint
from export.carrier import Carrier
from qat.artifact import Artifact
from qat.coverage import Layer

VERSION = 1
HOLDS = {"int4", "int4-asym", "int8", "w8a8", "fp8-channel", "fp8-tensor", "fp8-block"}
MIXED_GROUPS = True
KV_CACHE = False


def check(artifact: Artifact, carrier: Carrier) -> None:
    """Raise ValueError for a layer that the format has no place for."""
    check_slots("dense", carrier)
    check_kinds("dense", layers(artifact), HOLDS, MIXED_GROUPS)
    check_cache("dense", artifact)


def write(artifact: Artifact, out: Path, carrier: Carrier, shard_bytes: int) -> None:
    """Write the checkpoint into the folder `out`."""
    check(artifact, carrier)
    is_half = all(_is_half(artifact.get(f"{name}.weight")) for name in artifact.formats)
    stored_in = torch.float16 if is_half else torch.float32

    def parts(artifact: Artifact, layer: Layer, dtype: torch.dtype) -> dict[str, Lazy]:
        name = f"{layer.name}.weight"
        return {"weight": Lazy(stored_in, (layer.rows, layer.columns), lambda: artifact.get(name).to(stored_in))}

    dequantized = {f"{name}.weight" for name in artifact.formats}
    others = (lazy for name, lazy in tensors(artifact, carrier, parts).items() if name not in dequantized)
    loaded_as = "float16" if is_half and all(_is_half(lazy.make()) for lazy in others) else "float32"
    config = carrier.config | {"dtype": loaded_as, "torch_dtype": loaded_as}
    write_checkpoint(artifact, out, replace(carrier, config=config), shard_bytes, parts, None)


def _is_half(value: Tensor) -> bool:
    """True when every value is exact in float16."""
    return all(torch.equal(rows.half().float(), rows.float()) for rows in value.split(4096))
