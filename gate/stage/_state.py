"""What the gate measures: the parent, an artifact after a stage, an exported directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gate._inputs import CacheScales, hooks
from gate.readers import InputQuant, open_export
from qat.arch import arch_of
from qat.artifact import Artifact
from qat.checkpoint import Tensors
from qat.model import Model
from qat.scheme import Scheme


@dataclass(frozen=True)
class State:
    """Something to measure: the parent, an artifact after a stage, an exported directory.

    key: changes when its content may have. folder: its files. seconds: what making it took. baseline: the state
    (round-to-nearest) whose lost accuracy it should win back. input_quant: of the linears whose inputs are quantized.
    cache_scales: of a quantized KV cache, by block.
    """

    name: str
    key: str
    config: Any
    tensors: Tensors
    folder: Path
    format: str
    input_quant: Callable[[str], InputQuant] | None = None
    baseline: str | None = None
    seconds: float | None = None
    cache_scales: CacheScales | None = None

    def model(self, device: torch.device | str, dtype: torch.dtype, resident: bool = False) -> Model:
        """The model of this state, read block by block, activations quantized as its engine does."""
        model = Model(self.config, self.tensors, device, dtype, resident)
        if self.input_quant or self.cache_scales:
            model.prepare = hooks(model.arch, self.input_quant, self.cache_scales)
        return model


def plain_state(name: str, folder: Path, key: str = "", **more: Any) -> State:
    """A full-precision checkpoint (the parent), or any exported directory."""
    export = open_export(folder)
    input_quant = None if export.format == "dense" else export.input_quant
    cache = export.cache_scales if export.has_cache_scales() else None
    return State(name, key, export.config, export, folder, export.format, input_quant, cache_scales=cache, **more)


def artifact_state(name: str, artifact: Artifact, config: Any, key: str = "", **more: Any) -> State:
    """An artifact between stages; `config` is the parent's."""

    def input_quant(linear: str) -> InputQuant:
        if artifact.scheme.inputs is None or linear not in artifact.formats:
            return None
        static = artifact.optional(f"{linear}.input_scale")
        return dynamic_quant(artifact.scheme) if static is None else static.float().view(())

    def cache_scales(index: int) -> tuple[Tensor, Tensor] | None:
        return artifact.cache_scales(f"{arch_of(config).blocks}.{index}.self_attn")

    form, cache = str(artifact.scheme), cache_scales if artifact.scheme.kv_cache else None
    return State(name, key, config, artifact, artifact.path, form, input_quant, cache_scales=cache, **more)


def dynamic_inputs(scheme: Scheme, covers: Callable[[str], bool]) -> Callable[[str], InputQuant]:
    """The `input_quant` of a state whose covered linears need no static scale."""
    how = dynamic_quant(scheme)
    return lambda linear: how if covers(linear) else None


def dynamic_quant(scheme: Scheme) -> InputQuant:
    """How the covered linears' inputs are rounded while serving; None when they are not, or with a static scale."""
    if scheme.inputs is None or not scheme.inputs.dynamic:
        return None
    if scheme.inputs.per == "group":
        return "group"
    return "int8-token" if scheme.inputs.is_int else "token"
