"""The parent with every covered linear rounded to nearest at the widest range: the baseline row of the gate's table.

Nothing is written: each weight is quantized and dequantized when it is asked for. Activations are the gate's part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from calibrate.table import rtn
from qat.arch import Arch
from qat.checkpoint import Tensors
from qat.quant import dequantize
from qat.scheme import Scheme


class Rtn:
    """A `Tensors` source over another one. Covered weights come in float32, everything else as it is."""

    def __init__(self, parent: Tensors, arch: Arch, scheme: Scheme) -> None:
        self._parent, self._scheme = parent, scheme
        self._fused: dict[str, list[str]] = {}  # weight name -> weights that share its per-tensor scale
        for block in sorted({arch.split(name)[0] for name in parent.names() if name.startswith(arch.blocks + ".")}):
            for group in arch.shared(block):
                covered = [f"{linear}.weight" for linear in group if scheme.format_of(linear)]
                self._fused |= dict.fromkeys(covered, covered)

    def covers(self, linear: str) -> bool:
        """Whether the linear of this full name is rounded."""
        return f"{linear}.weight" in self._fused

    def names(self) -> list[str]:
        return self._parent.names()

    def get(self, name: str) -> Tensor:
        if name not in self._fused:
            return self._parent.get(name)
        fmt = self._scheme.format_of(name.removesuffix(".weight"))
        assert fmt is not None
        group = self._fused[name] if fmt.per == "tensor" else [name]
        q = rtn(torch.cat([self._parent.get(other).float() for other in group]), fmt)
        rows = [self._parent.get(other).shape[0] for other in group] if len(group) > 1 else [q.codes.shape[0]]
        return dequantize(q, fmt).split(rows)[group.index(name)]
