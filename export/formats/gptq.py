"""AutoGPTQ, version 1, symmetric: W[n, k] = (q[n, k] - 8) * s[n, k // g].

    X.qweight  int32 [K / 8, N]      X.qzeros  int32 [K / g, N / 8]
    X.scales   float16 [K / g, N]    X.g_idx   int32 [K]

Version 1 stores zero points less 1, so that every word of qzeros is 0x77777777. g_idx is k // g, as engines no longer
reorder inputs: an activation order lives inside the solver, with static groups. Asymmetric weights are not written, as
vLLM refuses sym: false.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from export import _pack
from export._layers import Layer, check_kinds, check_multiples, layers
from export._writer import Lazy, exactly, write_checkpoint
from export.carrier import Carrier
from qat.artifact import Artifact
from qat.quant import SYMMETRIC_ZERO

VERSION = 1
HOLDS = {"int4"}
MIXED_GROUPS = False


def check(artifact: Artifact, carrier: Carrier) -> None:
    """Raise ValueError for a layer that the layout has no place for."""
    found = layers(artifact)
    check_kinds("gptq", found, HOLDS, MIXED_GROUPS)
    check_multiples("gptq", found, rows=8, columns=8)


def write(artifact: Artifact, out: Path, carrier: Carrier, shard_bytes: int) -> None:
    """Write the checkpoint into the folder `out`."""
    check(artifact, carrier)
    group_size = next(iter(artifact.formats.values())).group_size
    quantization = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group_size or -1,
        "sym": True,
        "desc_act": False,
        "static_groups": False,
        "true_sequential": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
    }
    skipped = [name for name in carrier.linears() if name not in artifact.formats]
    if skipped:  # vLLM finds them in the files, other readers here
        quantization["dynamic"] = {f"-:^{re.escape(name)}$": {} for name in skipped}
    write_checkpoint(artifact, out, carrier, shard_bytes, _parts, quantization)


def _parts(artifact: Artifact, layer: Layer, dtype: torch.dtype) -> dict[str, Lazy]:
    def zeros() -> torch.Tensor:
        return _pack.gptq_zeros(torch.full((layer.rows, layer.groups), SYMMETRIC_ZERO, dtype=torch.uint8))

    def scales() -> torch.Tensor:
        return exactly(artifact.raw(f"{layer.name}.scale"), torch.float16, f"{layer.name}.scale").T

    def group_of_input() -> torch.Tensor:
        return torch.arange(layer.columns, dtype=torch.int32) // (layer.columns // layer.groups)

    def qweight() -> torch.Tensor:
        return _pack.gptq_codes(artifact.raw(f"{layer.name}.codes"))

    return {
        "qweight": Lazy(torch.int32, (layer.columns // 8, layer.rows), qweight),
        "qzeros": Lazy(torch.int32, (layer.groups, layer.rows // 8), zeros),
        "scales": Lazy(torch.float16, (layer.groups, layer.rows), scales),
        "g_idx": Lazy(torch.int32, (layer.columns,), group_of_input),
    }
