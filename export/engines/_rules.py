"""What vLLM and TensorRT-LLM both demand of quantized linears. No torch: a plan asks as well."""

from __future__ import annotations

from collections.abc import Sequence

from export._shapes import check_fused, check_multiples
from qat.arch import Arch
from qat.coverage import Layer
from qat.scheme import BLOCK


def check_common(engine: str, found: Sequence[Layer], arch: Arch) -> None:
    """Fused linears are stored alike; int4 and int8 in multiples of 32, w8a8 and fp8 (16-byte rows of the matrix units)
    of 16. Blocks end where a fused linear's part does, and activations come in whole groups of 128."""
    check_fused(engine, found, arch)
    blocks = {arch.split(layer.name)[0] for layer in found}
    fused = {name for block in blocks for names in arch.fused(block) if len(names) > 1 for name in names}
    for layer in found:
        rows = columns = 32 if layer.inputs is None else 16
        if layer.kind == "fp8-block":
            columns = BLOCK
            rows = BLOCK if layer.name in fused else rows
        check_multiples(f"{engine} {layer.kind}", [layer], rows, columns)
