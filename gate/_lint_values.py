"""Stored values: finite, usable as the engine loads them, and equal to their source. One tensor in memory at a time.

Integer codes and zero points need no range check: every pattern of their bits is one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gate._check import Fault
from gate.readers import Export
from qat.artifact import Artifact

AGAIN = "export again"
SHARED = {  # what engines do with parts that are not equal in linears which they fuse
    "weight_scale": "fused linears share one scale; engines take the largest and round the weights again",
    "input_scale": "fused linears share one scale; vllm takes the largest, trtllm's w4a8 stops",
    "weight_scale_2": "fused linears share one scale; trtllm stops",
    "pre_quant_scale": "fused linears share it; trtllm takes that of the first: wrong output without an error",
}
SCALES = ("scales", "weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale")


def check(export: Export) -> Iterator[Fault]:
    """Faults of scales, zero points, biases and plain tensors on their own."""
    serving = getattr(export.config, "dtype", None)
    for name, entry in export.stored.items():
        owner, _, part = name.rpartition(".")
        if owner in export.linears and part in SCALES:
            yield from _scale(name, export.raw(name), None if export.keeps_float32(owner) else serving)
        elif part in ("k_scale", "v_scale"):
            yield from _scale(name, export.raw(name), None)
        elif entry.dtype.startswith(("F", "BF")):
            value = export.raw(name)
            yield from _finite(name, value)
            if part in ("bias", "comp_bias"):
                yield from _exact(name, value, serving)
            else:
                yield from _in_range(name, value, serving)
    for name in export.linears:
        rows, columns = export.shapes[f"{name}.weight"]
        for broken in export.broken_rules(name, rows, columns):
            yield Fault(broken.part, f"{name}.{broken.part}", broken.value, broken.rule, broken.way_out)
    yield from _fused(export)


def _finite(name: str, value: Tensor) -> Iterator[Fault]:
    bad = ~torch.isfinite(value.float() if value.element_size() == 1 else value)  # fp8 has no isfinite
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        what = f"{value[where].float().item()} at {where}, {int(bad.sum())} such values"
        yield Fault("finite", name, what, "every stored value is finite", AGAIN)


def _scale(name: str, scale: Tensor, serving: torch.dtype | None) -> Iterator[Fault]:
    faults = list(_finite(name, scale))
    yield from faults
    if faults:
        return
    smallest = torch.finfo(scale.dtype).tiny
    for bad, what in ((scale <= 0, "zero or negative"), ((scale > 0) & (scale < smallest), "subnormal")):
        if bad.any():
            value = scale[bad].float().flatten()[0].item()
            rule = f"a scale in {str(scale.dtype).removeprefix('torch.')} is at least {smallest:g}"
            yield Fault("scale", name, f"{value:g} is {what}, {int(bad.sum())} such values", rule, "raise it to 2^-14")
    yield from _exact(name, scale, serving)


def _exact(name: str, value: Tensor, serving: torch.dtype | None) -> Iterator[Fault]:
    """Engines keep int4 scales and biases in the model's dtype."""
    if serving is None:
        return
    cast = value.to(serving).float()
    bad = cast != value.float()
    if bad.any():
        was, becomes = value[bad][0].float().item(), cast[bad][0].item()
        dtype = str(serving).removeprefix("torch.")
        what = f"{was:.9g} becomes {becomes:.9g} in {dtype}, {int(bad.sum())} such values"
        rule = f"config.json says {dtype}, in which engines keep it"
        yield Fault("rounded", name, what, rule, "round scales and biases to the serving dtype before choosing codes")


def _in_range(name: str, value: Tensor, serving: torch.dtype | None) -> Iterator[Fault]:
    """What is finite as stored is finite as loaded."""
    if serving is None or torch.finfo(value.dtype).max <= torch.finfo(serving).max:
        return
    bad = value.abs() > torch.finfo(serving).max
    if bad.any():
        dtype = str(serving).removeprefix("torch.")
        what = f"{value[bad][0].item():.6g} becomes infinite in {dtype}, {int(bad.sum())} such values"
        yield Fault("range", name, what, f"config.json says {dtype}, which engines load it in", "serve it in bfloat16")


def _fused(export: Export) -> Iterator[Fault]:
    for index in range(export.config.num_hidden_layers):
        shared = [[f"{export.arch.blocks}.{index}.{leaf}" for leaf in group] for group in export.arch.shared_input]
        for part in export.shared():
            for names in export.arch.one_input_scale(index) if part == "input_scale" else shared:
                stored = {n: export.raw(f"{n}.{part}") for n in names if f"{n}.{part}" in export.stored}
                whole = part == "pre_quant_scale"  # scales of several values belong to rows and groups
                values = {n: value.float().flatten() for n, value in stored.items() if whole or value.numel() == 1}
                first = next(iter(values.values()), None)
                if first is None or all(torch.equal(value, first) for value in values.values()):
                    continue
                place = next(int((v != first).nonzero()[0]) for v in values.values() if not torch.equal(v, first))
                what = ", ".join(f"{n.rpartition('.')[2]} {v[place]:.9g}" for n, v in values.items())
                yield Fault("shared", f"{names[0]}.{part}", what, SHARED[part], "calibrate them together")


def compare(export: Export, artifact: Artifact) -> Iterator[Fault]:
    """Every weight, bias, static input scale and untouched tensor against the artifact it was exported from."""
    source = set(artifact.names())
    for name in export.names():
        if name in source:
            yield from _equal(name, export.get(name), artifact.get(name))
        elif name.endswith(".bias"):
            value = export.get(name)
            yield from _equal(name, value, torch.zeros_like(value), "the source has no such bias, which is zeros")
        else:
            yield Fault("source", name, "stored", "the artifact has no tensor of that name", AGAIN)
    for name in sorted(source - set(export.names())):
        if name != f"{export.arch.head}.weight" or not export.config.tie_word_embeddings:
            yield Fault("source", name, "not stored", "the artifact has it", AGAIN)
    for name in export.linears:
        ours, theirs = export.input_quant(name), artifact.optional(f"{name}.input_scale")
        if isinstance(ours, Tensor) and theirs is not None:
            yield from _equal(f"{name}.input_scale", ours.flatten(), theirs.flatten())
    yield from _compare_caches(export, artifact)


def _compare_caches(export: Export, artifact: Artifact) -> Iterator[Fault]:
    if export.has_cache_scales() != (artifact.scheme.kv_cache is not None):
        what = f"{'declares' if export.has_cache_scales() else 'does not declare'} KV-cache scales"
        yield Fault("source", "config.json", what, "the artifact says otherwise", AGAIN)
        return
    for index in range(export.config.num_hidden_layers):
        ours = export.cache_scales(index)
        theirs = artifact.cache_scales(f"{export.arch.blocks}.{index}.self_attn")
        for name, mine, source in zip(export.cache_names(index), ours or (), theirs or (), strict=False):
            yield from _equal(name, mine, source)


def _equal(name: str, ours: Tensor, theirs: Tensor, rule: str = "it must equal its source exactly") -> Iterator[Fault]:
    if ours.shape != theirs.shape:
        yield Fault("source", name, f"shape {tuple(ours.shape)}", f"the source has {tuple(theirs.shape)}", AGAIN)
        return
    if ours.dtype == theirs.dtype and torch.equal(ours, theirs):  # no float32 copy of an embedding
        return
    ours, theirs = ours.float(), theirs.float()
    if torch.equal(ours, theirs):
        return
    where = tuple((ours != theirs).nonzero()[0].tolist())
    worst = (ours - theirs).abs().max().item()
    what = f"{ours[where].item():.9g} at {where} for {theirs[where].item():.9g} in the source; off by up to {worst:.3g}"
    yield Fault("source", name, what, rule, AGAIN)
