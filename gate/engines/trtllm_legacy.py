"""TensorRT-LLM up to 1.2: its checkpoint is made of what the later ones load, under the same rules of int4 kernels."""

from __future__ import annotations

from gate.engines.trtllm import check

__all__ = ["check"]
