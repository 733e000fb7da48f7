"""TensorRT-LLM, PyTorch backend (1.2 and later): it loads Hugging Face directories, there is no engine to build."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from export._shapes import check_multiples
from export.engines._rules import check_common
from qat.arch import Arch
from qat.coverage import Layer

VERSION = 1
ALSO_CALLED = ("tensorrt", "tensorrt-llm", "trt")
PROGRAM = "trtllm-serve"
# awq and gptq directories raise NotImplementedError there; of compressed-tensors, int4 and static fp8 fail to parse and
# w8a8 is taken for fp8
LOADS = {
    "modelopt": {"int4", "w4a8", "fp8-channel", "fp8-tensor", "fp8-block"},
    "compressed_tensors": {"fp8-block"},
    "dense": {"int4", "int4-asym", "int8", "w8a8", "fp8-channel", "fp8-tensor", "fp8-block"},
}
GROUP_SIZES = (64, 128)
# the attention is given KV-cache scales for NVFP4 only (modules/attention.py): an fp8 cache runs at scale 1 whatever is
# stored
KV_CACHE: set[str] = set()


def check(format_name: str, found: Sequence[Layer], arch: Arch) -> None:
    """Raise ValueError for layers that TensorRT-LLM would not load in this format."""
    if format_name == "dense":
        return
    check_common("trtllm", found, arch)
    for layer in found:
        if layer.fmt.bits == 4:
            _check_int4(layer, arch)


def _check_int4(layer: Layer, arch: Arch) -> None:
    """What its int4 kernels take: preprocess_weights_for_mixed_gemm and the loaders of modules/linear.py."""
    if arch.experts or any(leaf.endswith(("qkv_proj", "gate_up_proj")) for leaf in arch.linears):
        raise ValueError(
            f"{layer.name}: it is not known how trtllm loads int4 of {arch.class_name}, with experts or linears that "
            "are fused on disk; choose fp8 for it"
        )
    if layer.fmt.group_size not in GROUP_SIZES:
        raise ValueError(
            f"{layer.name} has group size {layer.fmt.group_size}; trtllm's int4 kernels take {GROUP_SIZES}: set "
            "scheme.weights.group_size to 128"
        )
    columns = 128 if layer.kind == "w4a8" else max(64, layer.fmt.group_size)  # 64 inputs on Ampere, 128 of w4a8
    check_multiples(f"trtllm {layer.kind}", [layer], rows=64, columns=columns)


NEEDS = {  # of a GPU; NVIDIA's hardware matrix
    "FP8": "FP8 needs compute capability 8.9 or newer (Ada, Hopper, Blackwell).",
    "FP8_PER_CHANNEL_PER_TOKEN": "FP8 with channel scales needs a Hopper GPU.",
    "FP8_PB_WO": "FP8 in blocks needs compute capability 9.0 or newer (Hopper, Blackwell).",
    "W4A16_AWQ": "INT4 weights need compute capability 8.0 or newer.",
    "W4A8_AWQ": "INT4 weights with FP8 activations need an Ada or Hopper GPU.",
}


def launch(directory_name: str, config: dict[str, Any]) -> dict[str, str]:
    """Files by path that start the server. directory_name: of the checkpoint. config: of the exported directory."""
    quantization = config.get("quantization_config") or {}
    found, needs = "The weights are not quantized", ""
    if quantization:
        algorithm = quantization.get("quant_algo", "FP8_PB_WO")  # of compressed-tensors only fp8 in blocks is loaded
        file = "hf_quant_config.json" if "quant_algo" in quantization else "config.json"
        found, needs = f"The quantization is found in {file}", NEEDS[algorithm]
    script = f"""#!/bin/sh
# Serve {directory_name} with TensorRT-LLM: OpenAI-compatible API on port 8000. Arguments are passed on (--tp_size 2).
# {found}; there is no engine to build. {needs}
# CONTEXT=N   longest sequence in tokens; by default what the model was made for ({config["max_position_embeddings"]})
cd "$(dirname "$0")/.." || exit 1
exec trtllm-serve . --host 0.0.0.0 --port 8000 --backend pytorch --extra_llm_api_options serve/trtllm.yaml \\
  --max_seq_len "${{CONTEXT:-{config["max_position_embeddings"]}}}" "$@"
"""
    options = """# Options of TensorRT-LLM's PyTorch backend that trtllm.sh passes.
kv_cache_config:
  dtype: auto # fp8 halves the cache; TensorRT-LLM runs it at scale 1
  enable_block_reuse: true
  free_gpu_memory_fraction: 0.9
enable_chunked_prefill: true
"""
    return {"serve/trtllm.sh": script, "serve/trtllm.yaml": options}
