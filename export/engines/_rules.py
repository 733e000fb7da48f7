"""What vLLM and TensorRT-LLM both demand of quantized linears."""

from __future__ import annotations

from collections.abc import Sequence

from export._layers import Layer, check_fused, check_multiples
from qat.arch import Arch


def check_common(engine: str, found: Sequence[Layer], arch: Arch) -> None:
    """Fused linears are stored alike; int4 in multiples of 32, fp8 (16-byte rows of the matrix units) of 16."""
    check_fused(engine, found, arch)
    for layer in found:
        unit = 32 if layer.fmt.is_int else 16
        check_multiples(f"{engine} {layer.kind}", [layer], rows=unit, columns=unit)
