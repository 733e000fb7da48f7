"""The trainable copy of an artifact, and the teacher beside it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qat.artifact import Artifact
from qat.fakequant import CompensatedLinear, OnGrid, QuantizedCache, attach_cache
from qat.model import Model
from qat.quant import MIN_SCALE, Quantized


class Student(Model):
    """A `Model` whose covered linears are `CompensatedLinear`s, wholly in memory beside its teacher.

    All learned numbers of a kind lie in one flat float32 parameter, so that rounding, optimizer and reduction over
    ranks are a few kernels, whatever the number of layers:

        bias  = grid(start + unit * delta)     unit: rms of the linear's outputs, so one rate fits all layers
        scale = grid(start * (1 + delta))      a relative change

    learn: any of bias, scale. slots: linears of a block (`mlp.down_proj`...) whose bias the target engines load.
    Embedding, final norm and head are the teacher's own tensors.
    """

    def __init__(self, teacher: Model, artifact: Artifact, learn: Collection[str], slots: Collection[str]) -> None:
        super().__init__(teacher.config, artifact, teacher.device, teacher.dtype, resident=True)
        self.teacher = teacher
        for path in (self.arch.embed, self.arch.norm, self.arch.head):
            self._set(path, teacher.root.get_submodule(path))
        self.linears: dict[str, CompensatedLinear] = {}
        start: dict[str, dict[str, Tensor]] = {"bias": {}, "scale": {}}
        for index, block in enumerate(self.blocks):
            for name in self.arch.linears:
                full = f"{self.arch.blocks}.{index}.{name}"
                if full not in artifact.formats:
                    continue
                q = artifact.quantized(full)
                zero = None if q.zero is None else q.zero.to(self.device)
                q = Quantized(q.codes.to(self.device), q.scale.to(self.device), zero)
                linear = CompensatedLinear(q, artifact.formats[full], "scale" in learn, self.dtype)
                if artifact.scheme.inputs is not None:
                    linear.input_format = artifact.scheme.inputs
                    static = artifact.optional(f"{full}.input_scale")
                    linear.input_scale = None if static is None else static.to(self.device)
                if "scale" in learn:
                    start["scale"][full] = q.scale.float()
                bias = artifact.optional(f"{full}.bias")
                if "bias" in learn and name in slots:
                    zeros = torch.zeros(q.codes.shape[0], device=self.device)
                    start["bias"][full] = zeros if bias is None else bias.float().to(self.device)
                elif bias is not None:
                    linear.bias = bias.to(self.device, self.dtype)
                parent, _, leaf = name.rpartition(".")
                setattr(block.get_submodule(parent), leaf, linear)
                self.linears[full] = linear
            self._fill_rest(index)
            attention = f"{self.arch.blocks}.{index}.self_attn"
            if (scales := artifact.cache_scales(attention)) is not None:
                cache = QuantizedCache(*(s.to(self.device) for s in scales))
                attach_cache(self.root.get_submodule(attention), cache)
        self.start = {kind: tensors for kind, tensors in start.items() if tensors}
        self.flat_start = {kind: torch.cat([t.flatten() for t in ts.values()]) for kind, ts in self.start.items()}
        self.delta = {kind: nn.Parameter(torch.zeros_like(t)) for kind, t in self.flat_start.items()}
        self.bias_unit = torch.ones_like(self.flat_start.get("bias", torch.empty(0)))

    def _fill_rest(self, index: int) -> None:
        """Norms and linears that the scheme leaves as they are."""
        held = {f"{name}.{part}" for name in self.linears for part in ("weight", "bias")}
        for name in self._block_names[index]:
            full = f"{self.arch.blocks}.{index}.{name}"
            if full not in held:
                owner, _, leaf = name.rpartition(".")
                value = self.tensors.get(full).to(self.device, self.dtype)
                setattr(self.blocks[index].get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))

    def load_block(self, index: int) -> nn.Module:
        return self.blocks[index]

    def ends(self) -> Any:
        return self.teacher.ends()

    def values(self, kind: str) -> Tensor:
        """The flat learned numbers as they would be exported: float32 on the grid, with a gradient to `delta`."""
        start, delta = self.flat_start[kind], self.delta[kind]
        if kind == "bias":
            return OnGrid.apply(start + self.bias_unit * delta)
        return OnGrid.apply((start * (1 + delta)).clamp_min(MIN_SCALE))

    def refresh(self) -> None:
        """Hand the current bias and scale to every linear; call before each forward pass."""
        for kind, starts in self.start.items():
            pieces = self.values(kind).to(self.dtype).split([t.numel() for t in starts.values()])
            for (name, start), piece in zip(starts.items(), pieces, strict=True):
                setattr(self.linears[name], kind, piece.view(start.shape))

    def overlay(self) -> dict[str, Tensor]:
        """The trained tensors as they are exported: X.bias (N,) and X.scale (N, K / g), float32 on the grid.

        Raises ValueError for a value without a finite float16 form.
        """
        out: dict[str, Tensor] = {}
        for kind, starts in self.start.items():
            flat = self.values(kind).detach().cpu()
            pieces = flat.split([t.numel() for t in starts.values()])
            for (name, start), piece in zip(starts.items(), pieces, strict=True):
                if not torch.isfinite(piece).all():
                    rule = "was trained past 65504, the end of float16; lower its rate in train.learn"
                    raise ValueError(f"{name}.{kind} {rule}")
                out[f"{name}.{kind}"] = piece.view(start.shape).clone()
        return out

    @torch.no_grad()
    def set_bias_unit(self, windows: Tensor) -> None:
        """Measure `bias_unit` on the teacher: per linear, the mean over channels of the root mean square output."""
        if "bias" not in self.start:
            return
        squares: dict[str, Tensor] = {}
        with _watch_outputs(self.teacher, list(self.start["bias"]), squares), self.teacher.ends():
            for ids in windows.split(1):
                run_blocks(self.teacher, ids)
        units = [
            (squares[name] / len(windows)).sqrt().mean().expand(t.numel()) for name, t in self.start["bias"].items()
        ]
        self.bias_unit = torch.cat(units)


def run_blocks(model: Model, ids: Tensor) -> Tensor:
    """The last block's output (batch, length, hidden) of token ids (batch, length). Inside `ends()`."""
    if isinstance(model, Student):
        model.refresh()
    hidden = model.embed(ids)
    for index in range(len(model.blocks)):
        model.load_block(index)
        hidden = model.run_block(index, hidden)
    return hidden


@contextmanager
def _watch_outputs(model: Model, names: list[str], squares: dict[str, Tensor]) -> Iterator[None]:
    """Add the mean square output per channel of each forward pass to `squares`, without the first token (a sink)."""

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            squares[name] = squares.get(name, 0) + output[:, 1:].float().square().mean((0, 1))

        return hook

    for index in range(len(model.blocks)):
        model.load_block(index)
    handles = [model.root.get_submodule(name).register_forward_hook(watch(name)) for name in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
