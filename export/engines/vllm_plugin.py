"""vLLM with tare-vllm (folder plugin/) installed, which gives every linear a bias but those of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from export.engines import vllm
from qat.arch import Arch
from qat.coverage import Layer

VERSION = 1
PROGRAM = "vllm"
BASE = "vllm"  # whose rules and bias slots it has, beside comp_bias
LOADS = {
    "awq": {"int4", "int4-asym"},
    "gptq": {"int4", "int8"},
    "compressed_tensors": {"int4", "int4-asym", "int8", "w8a8", "fp8-channel", "fp8-tensor", "fp8-block"},
}
KV_CACHE = {"compressed_tensors"}


def check(format_name: str, found: Sequence[Layer], arch: Arch) -> None:
    """Raise ValueError for layers that vLLM would not load in this format."""
    vllm.check(format_name, found, arch)


def launch(directory_name: str, config: dict[str, Any]) -> dict[str, str]:
    """Files by path that start the server. directory_name: of the checkpoint. config: of the exported directory."""
    return {"serve/vllm_plugin.sh": vllm.launch(directory_name, config)["serve/vllm.sh"]}
