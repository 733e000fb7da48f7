"""vLLM 0.26 and later. LOADS and the rules below are what its loaders and kernel gates accept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from export._layers import Layer
from export.engines._rules import check_common
from qat.arch import Arch

VERSION = 1
LOADS = {
    "awq": {"int4", "int4-asym"},
    "gptq": {"int4", "int8"},
    "compressed_tensors": {"int4", "int4-asym", "int8", "w8a8", "fp8-channel", "fp8-tensor", "fp8-block"},
    "modelopt": {"fp8-channel", "fp8-tensor", "fp8-block"},
    "dense": {"int4", "int4-asym", "int8", "w8a8", "fp8-channel", "fp8-tensor", "fp8-block"},
}
KV_CACHE = {
    "compressed_tensors",
    "modelopt",
}  # whose static scales it reads; others run an fp8 cache at scale 1
GROUP_SIZES = (32, 64, 128)  # of the Marlin kernels, beside whole rows; auto_gptq.py refuses any other one everywhere


def check(format_name: str, found: Sequence[Layer], arch: Arch) -> None:
    """Raise ValueError for layers that vLLM would not load in this format."""
    if format_name == "dense":
        return
    check_common("vllm", found, arch)
    if format_name == "compressed_tensors" and arch.experts:
        _check_experts(found, arch)
    for layer in found:
        if layer.fmt.is_int and layer.fmt.group_size not in (None, *GROUP_SIZES):
            fit = [size for size in GROUP_SIZES if layer.columns % size == 0]
            raise ValueError(
                f"{layer.name} has group size {layer.fmt.group_size}; vllm runs {GROUP_SIZES} or whole rows. Set "
                f"scheme.weights.group_size to one of {fit or 'null (whole rows)'}, or leave vllm out of export.engines"
            )


def _check_experts(found: Sequence[Layer], arch: Arch) -> None:
    """compressed_tensors_moe.py knows symmetric int4 only, and asks for the scheme of experts.0.gate_proj by name."""
    experts = [layer for layer in found if f".{arch.experts}." in layer.name]
    asymmetric = next((layer for layer in experts if layer.kind == "int4-asym"), None)
    if asymmetric:
        raise ValueError(
            f"{asymmetric.name} is {asymmetric.fmt}; vllm runs experts in compressed_tensors symmetric only. Export "
            "awq, or set scheme.weights.symmetric to true"
        )
    renamed = arch.gate_up_down != ("gate_proj", "up_proj", "down_proj")
    blocks = {layer.name.partition(f".{arch.experts}.")[0] for layer in experts}
    others = {layer.name.partition(".self_attn.")[0] for layer in found if ".self_attn." in layer.name} - blocks
    if renamed and (len({layer.fmt for layer in found}) > 1 or others):
        raise ValueError(
            f"not all linears have the same format, and vllm does not find the experts of {arch.class_name} "
            f"({', '.join(arch.gate_up_down)}) by name in compressed_tensors; quantize all alike, or export awq or gptq"
        )


def launch(directory_name: str, config: dict[str, Any]) -> dict[str, str]:
    """Files by path that start the server. directory_name: of the checkpoint. config: of the exported directory."""
    needs = ""
    if (config.get("quantization_config") or {}).get("quant_method") == "modelopt":
        needs = "# FP8 with one scale per tensor needs a GPU of compute capability 8.9 or newer.\n"
    script = f"""#!/bin/sh
# Serve this checkpoint with vLLM: OpenAI-compatible API on port 8000. Arguments are passed on, e.g. --port 9000.
# The quantization is found in config.json; do not pass --quantization.
{needs}cd "$(dirname "$0")/.." || exit 1
exec vllm serve . --served-model-name {directory_name} --dtype {config["dtype"]} "$@"
"""
    return {"serve/vllm.sh": script}
