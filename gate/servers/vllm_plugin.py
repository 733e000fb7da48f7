"""vLLM with tare-vllm in the same environment, which it finds by itself."""

from __future__ import annotations

from gate.servers.vllm import ENVIRONMENT, HEALTH, bench, read, serve, weights_gb

VERSION = 2
__all__ = ["ENVIRONMENT", "HEALTH", "VERSION", "bench", "read", "serve", "weights_gb"]
