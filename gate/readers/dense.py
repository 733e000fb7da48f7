"""A plain checkpoint: every weight as it is. What `dense` writes, and what a full-precision parent is."""

from __future__ import annotations

from torch import Tensor

from gate.readers._export import Export, Spec


class Reader(Export):
    """A directory without quantized linears."""

    def codes(self, name: str) -> Tensor:
        raise ValueError(f"{self.folder} is dense: {name} has no codes, only {name}.weight")

    def scale(self, name: str) -> Tensor:
        raise ValueError(f"{self.folder} is dense: {name} has no scale, only {name}.weight")

    def layout(self, name: str, rows: int, columns: int) -> dict[str, Spec]:
        return {}
