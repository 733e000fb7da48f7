"""Read an exported directory back, by code that shares nothing with the writer but the format's definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gate.readers._export import Export, InputQuant, Spec
from qat import plugins
from qat.index import ARTIFACT
from qat.parent import read_config_json

__all__ = ["Export", "InputQuant", "Spec", "detect", "open_export"]

FORMAT_OF = {"awq": "awq", "gptq": "gptq", "compressed-tensors": "compressed_tensors"}  # by quant_method


def open_export(directory: Path | str) -> Export:
    """The reader of an exported directory, its format told by config.json and hf_quant_config.json.

    Example: `Model(export.config, export)` with `export = open_export("runs/demo/export/awq")`. Raises ValueError for a
    directory that is not whole, or in a format that no file of gate/readers reads.
    """
    folder = Path(directory)
    name, quantization = detect(folder)
    carried = quantization.get("comp_bias") or []
    if not isinstance(carried, list) or not all(isinstance(linear, str) for linear in carried):
        raise ValueError(f"{folder}: comp_bias is {carried!r}; a list of linears is expected")
    export: Export = plugins.find("gate.readers", name).Reader(folder, quantization.get("base", quantization), carried)
    return export


def detect(folder: Path) -> tuple[str, dict[str, Any]]:
    """(file of gate/readers, quantization config). `dense` and {} for a plain checkpoint."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json; give the folder of an exported checkpoint")
    if (folder / ARTIFACT).is_file():
        raise ValueError(f"{folder} is a stage before export, in Tare's own layout; give a folder exported from it")
    inline = read_config_json(folder).get("quantization_config") or {}
    base = inline.get("base") or {}
    if not isinstance(base, dict):
        raise ValueError(
            f"{folder}: base in quantization_config is {base!r}, where an object is expected; export again"
        )
    method = str(inline.get("quant_method", ""))
    if (folder / "hf_quant_config.json").is_file() or method.startswith("modelopt"):
        if method and not method.startswith("modelopt"):
            raise ValueError(
                f"{folder}: config.json says quant_method {method!r}, yet there is an hf_quant_config.json, which "
                "TensorRT-LLM obeys; one directory holds one format: remove the file that is not meant"
            )
        return "modelopt", inline
    if not inline:
        return "dense", {}
    if method == "tare":  # a stock format, and biases for the plugin tare-vllm
        method = str(base.get("quant_method"))
    if method not in FORMAT_OF:
        raise ValueError(
            f"{folder}: quant_method {method!r} is not one that the gate reads "
            f"({', '.join(FORMAT_OF)}, modelopt); a new one is a new file gate/readers/{method or 'x'}.py"
        )
    return FORMAT_OF[method], inline
