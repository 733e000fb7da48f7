"""vLLM 0.26 and later. LOADS and the rules below are what its loaders and kernel gates accept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from export.engines._rules import check_common
from qat.arch import Arch
from qat.coverage import Layer

VERSION = 1
PROGRAM = "vllm"  # of a serve/NAME.sh, for `tare serve`
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
                f"group_size in scheme.weights or scheme.overrides to one of {fit or 'null (whole rows)'}, or leave "
                "vllm out of export.engines"
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
    quantization = config.get("quantization_config") or {}
    needs, cache = "", ""
    if quantization.get("quant_method") == "modelopt":
        needs = "# FP8 with static or channel scales needs a GPU of compute capability 8.9 or newer.\n"
    if quantization.get("quant_method") == "tare":
        needs = "# Needs the package tare-vllm beside vLLM, which carries the biases of linears without a slot.\n"
    if quantization.get("kv_cache_scheme") or quantization.get("base", {}).get("kv_cache_scheme"):
        cache = " --kv-cache-dtype fp8"
    script = f"""#!/bin/sh
# Serve this checkpoint with vLLM: OpenAI-compatible API on port 8000. Arguments are passed on, e.g. --port 9000.
# The quantization is found in config.json; do not pass --quantization.
{needs}# CONTEXT=N   longest sequence in tokens; by default the model's own ({config["max_position_embeddings"]})
# PRIORITY=1  requests may carry "priority": lower is served earlier
{_stretch(config)}cd "$(dirname "$0")/.." || exit 1
[ -z "$CONTEXT" ] || set -- --max-model-len "$CONTEXT" "$@"
[ -z "$PRIORITY" ] || set -- --scheduling-policy priority "$@"
exec vllm serve . --served-model-name {directory_name} --dtype {config["dtype"]}{cache} "$@"
"""
    return {"serve/vllm.sh": script}


def _stretch(config: dict[str, Any]) -> str:
    """Lines for a longer context by dynamic NTK or YaRN, for models whose rotary embedding is the plain one."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default" or "rope_theta" not in rope:
        return ""
    length = config["max_position_embeddings"]
    theta = f'"rope_theta": {rope["rope_theta"]}'
    # the whole dict is replaced, so the base belongs in it; of yarn vLLM does not multiply the length itself
    return f"""# STRETCH=F   F times that context (a whole number) by dynamic NTK, or with METHOD=yarn by YaRN
if [ -n "$STRETCH" ]; then
  case "${{METHOD:-dynamic}}" in
    dynamic) rope='{{"rope_type": "dynamic", {theta}, "factor": '$STRETCH'}}' more= ;;
    yarn) rope='{{"rope_type": "yarn", {theta}, "original_max_position_embeddings": {length}, "factor": '$STRETCH'}}'
      more=', "max_position_embeddings": '$(({length} * STRETCH)) ;;
    *) echo "METHOD is dynamic or yarn, not $METHOD" >&2; exit 2 ;;
  esac
  set -- --hf-overrides '{{"rope_parameters": '"$rope$more"'}}' "$@"
fi
"""
