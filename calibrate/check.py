"""Which methods can do a scheme: said before any work is done."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from qat.scheme import TensorFormat


def methods(
    found: Mapping[str, TensorFormat], inputs: TensorFormat | None, chosen: Mapping[str, tuple[str, ModuleType]]
) -> None:
    """Raise ValueError when a method cannot do a dtype of the scheme, or a transform such inputs.

    inputs: of the scheme. chosen: question -> (plugin name, module). `inputs` is not asked: the recipe knows which
    dtypes its answers do.
    """
    for question, (name, module) in chosen.items():
        if question == "inputs":
            continue
        for dtype in sorted({fmt.dtype for fmt in found.values()} - set(module.DTYPES)):
            way_out = {"range": "max", "round": "nearest", "transform": "none"}[question]
            raise ValueError(f"calibrate.{question}: {name} does not do {dtype}; set it to {way_out} for this scheme")
    name, transform = chosen["transform"]
    if (inputs is not None) not in transform.QUANTIZED_INPUTS:
        is_, only = (f"is {inputs}", "weights alone") if inputs is not None else ("is null", "quantized inputs")
        raise ValueError(f"calibrate.transform: {name} is for {only}, and scheme.inputs {is_}; set it to none")
