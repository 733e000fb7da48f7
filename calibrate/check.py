"""Which methods can do a scheme: said before any work is done."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from qat.scheme import TensorFormat


def methods(found: Mapping[str, TensorFormat], chosen: Mapping[str, tuple[str, ModuleType]]) -> None:
    """Raise ValueError when a method cannot do a dtype of the scheme. chosen: question -> (plugin name, module).

    `inputs` is not asked: the recipe knows which dtypes its answers do.
    """
    for question, (name, module) in chosen.items():
        if question == "inputs":
            continue
        for dtype in sorted({fmt.dtype for fmt in found.values()} - set(module.DTYPES)):
            way_out = {"range": "max", "round": "nearest", "transform": "none"}[question]
            raise ValueError(f"calibrate.{question}: {name} does not do {dtype}; set it to {way_out} for this scheme")
