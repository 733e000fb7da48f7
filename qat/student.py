"""The trainable copy of an artifact, and the teacher beside it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

from qat import plugins
from qat.artifact import Artifact
from qat.fakequant import ROW, WEIGHT, CompensatedLinear, GradientInto, QuantizedCache, attach_cache
from qat.model import Model
from qat.parts import Part
from qat.quant import Quantized, pack_nibbles


class Student(Model):
    """A `Model` whose covered linears are `CompensatedLinear`s, wholly in memory.

    learn: options by learnable (a file of qat/learn); its numbers are `delta[learnable]`, one flat float32 parameter.
    slots: linears of a block (`mlp.down_proj`...) whose bias the target engines load. Embedding, final norm and head
    are the teacher's own tensors. prepare: as of `Model`. packed: keep weights as codes, where neither codes nor zero
    points are learned. A step is

        refresh()   deltas -> what would be exported -> every linear and norm, in place
        backward    of any number of micro-batches: adds to `parts[...].grad`
        pull()      -> `delta[...].grad`

    Raises ValueError for a learnable that the artifact's format has no place for.
    """

    def __init__(
        self,
        teacher: Model,
        artifact: Artifact,
        learn: Mapping[str, Any],
        slots: Collection[str],
        prepare: Callable[[int, nn.Module], None] | None = None,
        packed: bool = False,
    ) -> None:
        super().__init__(teacher.config, artifact, teacher.device, teacher.dtype, resident=True)
        self.packed = packed
        self.teacher, self.artifact, self.learn = teacher, artifact, dict(learn)
        self.modules = {kind: plugins.find("qat.learn", kind) for kind in sorted(learn)}
        self.linears: dict[str, CompensatedLinear] = {}
        for path in (self.arch.embed, self.arch.norm, self.arch.head):
            self._set(path, teacher.root.get_submodule(path))
        if "bias" in learn:
            slots = self.modules["bias"].places(learn["bias"], slots)
        starts: dict[str, dict[str, Tensor]] = {module.PART: {} for module in self.modules.values()}
        for index in range(len(self.blocks)):
            for name in self.arch.linears:
                if f"{self.arch.blocks}.{index}.{name}" in artifact.formats:
                    self._add_linear(index, name, name in slots, starts)
            self._fill_rest(index, starts)
            attention = f"{self.arch.blocks}.{index}.self_attn"
            if (scales := artifact.cache_scales(attention)) is not None:
                cache = QuantizedCache(*(s.to(self.device) for s in scales))
                attach_cache(self.root.get_submodule(attention), cache)
            if prepare:
                prepare(index, self.blocks[index])
        self.parts = {name: self._part(name, tensors) for name, tensors in starts.items() if tensors}
        self.delta = {
            kind: nn.Parameter(torch.zeros(self.parts[module.PART].size_of(kind), device=self.device))
            for kind, module in self.modules.items()
            if module.PART in self.parts
        }
        self._cast: dict[str, Tensor] = {}  # bias and norm in the dtype of the computation
        self._values: dict[str, Tensor] = {}
        for name, part in self.parts.items():
            self._connect(name, part)
        self.refresh()

    def _add_linear(self, index: int, name: str, has_slot: bool, starts: dict[str, dict[str, Tensor]]) -> None:
        full = f"{self.arch.blocks}.{index}.{name}"
        stored, fmt = self.artifact.quantized(full), self.artifact.formats[full]
        for kind, module in self.modules.items():
            if fmt.dtype not in module.DTYPES or (module.NEEDS_ZERO and stored.zero is None):
                why = "it has no zero points" if fmt.dtype in module.DTYPES else f"it is for {sorted(module.DTYPES)}"
                raise ValueError(f"train.learn.{kind} does not work on {full}, which is {fmt}: {why}; leave it out")
        q = Quantized(*(None if part is None else part.to(self.device) for part in stored))  # type: ignore[arg-type]
        linear = CompensatedLinear(q, fmt, any(part in starts for part in WEIGHT), self.dtype, self.packed)
        if self.artifact.scheme.inputs is not None:
            linear.input_format = self.artifact.scheme.inputs
            static = self.artifact.optional(f"{full}.input_scale")
            linear.input_scale = None if static is None else static.to(self.device)
        for part, value in (("scale", q.scale), ("zero", q.zero), ("codes", q.codes)):
            if part in starts:
                assert value is not None
                starts[part][full] = value.float()
        bias = self.artifact.optional(f"{full}.bias")
        if "bias" in starts and has_slot:
            zeros = torch.zeros(len(q.codes), device=self.device)
            starts["bias"][full] = (zeros if bias is None else bias.float().to(self.device))[:, None]
        elif bias is not None:
            linear.bias = bias.to(self.device, self.dtype)
        owner, _, leaf = name.rpartition(".")
        setattr(self.blocks[index].get_submodule(owner), leaf, linear)
        self.linears[full] = linear

    def _fill_rest(self, index: int, starts: dict[str, dict[str, Tensor]]) -> None:
        """Norms and linears that the scheme leaves as they are."""
        held = {f"{name}.{part}" for name in self.linears for part in ("weight", "bias")}
        for name in self._block_names[index]:
            full = f"{self.arch.blocks}.{index}.{name}"
            if full in held:
                continue
            owner, _, leaf = name.rpartition(".")
            module, value = self.blocks[index].get_submodule(owner), self.tensors.get(full)
            setattr(module, leaf, nn.Parameter(value.to(self.device, self.dtype), requires_grad=False))
            if "norm" in starts and leaf == "weight" and value.dim() == 1:
                starts["norm"][full] = value.to(self.device).float()[:, None]

    def _part(self, name: str, tensors: dict[str, Tensor]) -> Part:
        learnables = {kind: module for kind, module in self.modules.items() if name == module.PART}
        signed = [linear for linear in tensors if name == "codes" and self.artifact.formats[linear].dtype == "int8"]
        return Part(name, tensors, learnables, dict.fromkeys(signed, (-128, 127)))

    def _connect(self, name: str, part: Part) -> None:
        """Give linears and norms their views of what they use, and of where backward adds."""
        flat = part.current
        if name in ("bias", "norm") and self.dtype != torch.float32:
            flat = self._cast[name] = part.current.to(self.dtype)
        current = part.views(flat, by_row=name in ("bias", "norm"))
        grads = part.views(part.grad, by_row=part.per_row or name in ("bias", "norm"))
        for full, value in current.items():
            if name == "norm":
                owner, _, leaf = full.rpartition(".")
                norm = self.root.get_submodule(owner)
                setattr(norm, leaf, nn.Parameter(value, requires_grad=False))
                register_parametrization(norm, leaf, GradientInto(grads[full]))
                continue
            linear = self.linears[full]
            linear.grads[ROW if part.per_row else name] = grads[full]
            if name in ("bias", "scale"):
                setattr(linear, name, value)

    def load_block(self, index: int) -> nn.Module:
        return self.blocks[index]

    def ends(self) -> Any:
        return self.teacher.ends()

    def refresh(self) -> None:
        """Hand what the deltas make to every linear and norm; call whenever a delta changed."""
        self._values = {name: part.value(self.delta) for name, part in self.parts.items()}
        with torch.no_grad():
            for name, part in self.parts.items():
                part.current.copy_(self._values[name])
                if name in self._cast:
                    self._cast[name].copy_(part.current)
            if any(name in self.parts for name in WEIGHT):
                signed = self._moved()
                for name, linear in self.linears.items():
                    linear.refresh(signed(name))

    def _moved(self) -> Any:
        """name -> codes less zero points where training moves them, else None."""
        moved = {
            n: self.parts[n].views(self.parts[n].current - self.parts[n].start, False)
            for n in ("codes", "zero")
            if n in self.parts
        }

        def signed(name: str) -> Tensor | None:
            now, rows = self.linears[name].signed, self.linears[name].rows
            if now is None or not moved:
                return None
            if "codes" in moved:
                now = now + moved["codes"][name][rows].view(now.shape)
            return now - moved["zero"][name][rows][..., None] if "zero" in moved else now

        return signed

    def begin(self, windows: Tensor) -> None:
        """Measure units and set starts on token ids (num_windows, length); before the first step."""
        for kind in self.delta:
            if hasattr(self.modules[kind], "begin"):
                self.modules[kind].begin(self, self.learn[kind], windows)
        self.refresh()

    def zero_grad(self) -> None:
        for part in self.parts.values():
            part.grad.zero_()
        for delta in self.delta.values():
            delta.grad = None

    def pull(self) -> None:
        """From the gradients of what is stored to those of the deltas."""
        names = list(self.parts)
        torch.autograd.backward([self._values[n] for n in names], [self.parts[n].value_grad() for n in names])

    def overlay(self) -> dict[str, Tensor]:
        """The trained tensors as they are exported.

        X.bias (N,) and X.scale (N, K / g) float32, X.zero and X.codes as the artifact stores them, norms in the
        artifact's dtype. Raises ValueError for a value without a finite float16 form.
        """
        out: dict[str, Tensor] = {}
        with torch.no_grad():
            for part_name, part in self.parts.items():
                kinds = " or ".join(part.learnables)
                flat = part.value(self.delta).cpu()
                for name, value in part.views(flat, by_row=part_name in ("bias", "norm")).items():
                    stored_name = name if part_name == "norm" else f"{name}.{part_name}"
                    if not torch.isfinite(value).all():
                        rule = "was trained past 65504, the end of float16; lower the rate of"
                        raise ValueError(f"{stored_name} {rule} {kinds} in train.learn")
                    out[stored_name] = self._as_stored(stored_name, part_name, value)
        return out

    def _as_stored(self, name: str, part: str, value: Tensor) -> Tensor:
        if part in ("bias", "scale"):
            return value.clone()
        if part == "norm":
            return value.to(self.tensors.get(name).dtype)
        stored = self.artifact.raw(name)
        made = value.to(stored.dtype)
        return pack_nibbles(made) if part == "codes" and stored.dtype == torch.uint8 else made


def run_blocks(model: Model, ids: Tensor, checkpointed: int = 0) -> Tensor:
    """The last block's output (batch, length, hidden) of token ids (batch, length). Inside `ends()`.

    checkpointed: of so many blocks, from the first, backward computes the forward pass again instead of keeping it.
    """
    hidden = model.embed(ids)
    for index in range(len(model.blocks)):
        model.load_block(index)
        if index < checkpointed and torch.is_grad_enabled():
            hidden = checkpoint(model.run_block, index, hidden, use_reentrant=False, preserve_rng_state=False)
        else:
            hidden = model.run_block(index, hidden)
    return hidden
