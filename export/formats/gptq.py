"""AutoGPTQ, version 1, symmetric: W[n, k] = (q[n, k] - z) * s[n, k // g], z = 8 of 4 bits, 128 of 8.

    X.qweight  int32 [K / 8, N], of 8 bits [K / 4, N]      X.qzeros  int32 [K / g, N / 8], of 8 bits [K / g, N / 4]
    X.scales   float16 [K / g, N]                          X.g_idx   int32 [K]

Version 1 stores zero points less 1, so that every word of qzeros is 0x77777777, of 8 bits 0x7f7f7f7f. g_idx is k // g,
as engines no longer reorder inputs: an activation order lives inside the solver, with static groups. Asymmetric weights
are not written, as vLLM refuses sym: false. Linears that differ from most in bits or group size stand in `dynamic`, as
GPTQModel writes it: a regular expression for each, which also matches the name that vLLM gives the fused linear.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from export import _pack
from export._layers import check_cache, check_kinds, layers
from export._shapes import check_multiples
from export._writer import Lazy, exactly, write_checkpoint, write_json
from export.carrier import Carrier
from qat.artifact import Artifact
from qat.coverage import Layer

VERSION = 3
HOLDS = {"int4", "int8"}
MIXED_GROUPS = True
KV_CACHE = False
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}  # vLLM's names
FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


def check(artifact: Artifact, carrier: Carrier) -> None:
    """Raise ValueError for a layer that the layout has no place for."""
    found = layers(artifact)
    check_kinds("gptq", found, HOLDS, MIXED_GROUPS)
    usual = _usual(found)
    for layer in found:
        unit = 32 // layer.fmt.bits
        check_multiples("gptq", [layer], rows=unit, columns=unit)
        if ".experts." in layer.name and _options(layer) != usual:
            raise ValueError(
                f"{layer.name} is {layer.fmt}, unlike most linears: vLLM runs the experts of a block as one layer, "
                "which gptq cannot name; leave out its scheme.overrides or export compressed_tensors"
            )
    check_cache("gptq", artifact)


def write(artifact: Artifact, out: Path, carrier: Carrier, shard_bytes: int) -> None:
    """Write the checkpoint into the folder `out`."""
    check(artifact, carrier)
    found = layers(artifact)
    usual = _usual(found)
    quantization = {
        "quant_method": "gptq",
        **dict(usual),
        "sym": True,
        "desc_act": False,
        "static_groups": False,
        "true_sequential": True,
        "lm_head": False,
        "checkpoint_format": "gptq",
    }
    # vLLM finds skipped linears in the files, but experts, which it asks for as a whole, and other readers all, here
    skipped = [name for name in carrier.unquantized(artifact.formats) if name != carrier.arch.head]
    dynamic: dict[str, dict[str, Any]] = {f"-:^{re.escape(name)}$": {} for name in skipped}
    for layer in found:
        if _options(layer) != usual:
            owner, _, leaf = layer.name.rpartition(".")
            names = "|".join(dict.fromkeys([leaf, FUSED.get(leaf, leaf)]))
            dynamic[f"+:^{re.escape(owner)}\\.({names})$"] = dict(_options(layer))
    if dynamic:
        quantization["dynamic"] = dynamic
    write_checkpoint(artifact, out, carrier, shard_bytes, _parts, quantization)
    write_json(quantization, out / "quantize_config.json")  # without it AutoGPTQ 0.7 does not open a local folder


Options = tuple[tuple[str, int], ...]


def _options(layer: Layer) -> Options:
    return ("bits", layer.fmt.bits), ("group_size", layer.fmt.group_size or -1)


def _usual(found: Sequence[Layer]) -> Options:
    return Counter(map(_options, found)).most_common(1)[0][0]


def _parts(artifact: Artifact, layer: Layer, dtype: torch.dtype) -> dict[str, Lazy]:
    per_word = 32 // layer.fmt.bits

    def zeros() -> torch.Tensor:
        word = {4: 0x77777777, 8: 0x7F7F7F7F}[layer.fmt.bits]
        return torch.full((layer.groups, layer.rows // per_word), word, dtype=torch.int32)

    def scales() -> torch.Tensor:
        return exactly(artifact.raw(f"{layer.name}.scale"), torch.float16, f"{layer.name}.scale").T

    def group_of_input() -> torch.Tensor:
        return torch.arange(layer.columns, dtype=torch.int32) // (layer.columns // layer.groups)

    def qweight() -> torch.Tensor:
        return _pack.gptq_codes(artifact.raw(f"{layer.name}.codes"))

    return {
        "qweight": Lazy(torch.int32, (layer.columns // per_word, layer.rows), qweight),
        "qzeros": Lazy(torch.int32, (layer.groups, layer.rows // per_word), zeros),
        "scales": Lazy(torch.float16, (layer.groups, layer.rows), scales),
        "g_idx": Lazy(torch.int32, (layer.columns,), group_of_input),
    }
