"""TensorRT-LLM, PyTorch backend (1.2 and later): it loads Hugging Face directories, there is no engine to build."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from export._layers import Layer
from export.engines._rules import check_common
from qat.arch import Arch

VERSION = 1
# awq and gptq directories raise NotImplementedError there; of compressed-tensors, int4 and static fp8 fail to parse and
# w8a8 is taken for fp8
LOADS = {
    "modelopt": {"fp8-tensor", "fp8-block"},
    "compressed_tensors": {"fp8-block"},
    "dense": {"int4", "int4-asym", "int8", "w8a8", "fp8-channel", "fp8-tensor", "fp8-block"},
}
# the attention is given KV-cache scales for NVFP4 only (modules/attention.py): an fp8 cache runs at scale 1 whatever is
# stored
KV_CACHE: set[str] = set()


def check(format_name: str, found: Sequence[Layer], arch: Arch) -> None:
    """Raise ValueError for layers that TensorRT-LLM would not load in this format."""
    if format_name != "dense":
        check_common("trtllm", found, arch)


def launch(directory_name: str, config: dict[str, Any]) -> dict[str, str]:
    """Files by path that start the server. directory_name: of the checkpoint. config: of the exported directory."""
    script = f"""#!/bin/sh
# Serve {directory_name} with TensorRT-LLM: OpenAI-compatible API on port 8000. Arguments are passed on (--tp_size 2).
# The quantization is found in hf_quant_config.json. FP8 needs a GPU of compute capability 8.9 or newer.
cd "$(dirname "$0")/.." || exit 1
exec trtllm-serve . --host 0.0.0.0 --port 8000 --backend pytorch "$@"
"""
    return {"serve/trtllm.sh": script}
