"""What an artifact holds, told from its headers, and the rules that formats and engines have in common.

A rule that is broken is a ValueError that names the linear, the value, the rule and the way out, before any file is
written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors import safe_open

from qat.arch import Arch
from qat.artifact import OVERLAY, REST, Artifact
from qat.coverage import Layer

if TYPE_CHECKING:
    from export.carrier import Carrier

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
}


class Stored(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]


def by_number(name: str) -> list[tuple[int, str]]:
    """Sort key of tensor names: block 2 comes before block 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def stored(artifact: Artifact) -> dict[str, Stored]:
    """Dtype and shape of every stored tensor; reads headers only. A trained tensor stands for the one it replaces."""
    files = [*sorted(p.name for p in artifact.path.glob("block-*.safetensors")), REST, OVERLAY]
    found = {}
    for path in (artifact.path / file for file in files):
        if path.exists():
            with safe_open(path, framework="pt") as f:
                for name in f.keys():  # noqa: SIM118 - not a dict
                    part = f.get_slice(name)
                    found[name] = Stored(DTYPES[part.get_dtype()], tuple(part.get_shape()))
    return found


def layers(artifact: Artifact) -> list[Layer]:
    """The quantized linears, in the order of the blocks."""
    at = stored(artifact)
    found = []
    for name in sorted(artifact.formats, key=by_number):
        dtype, (rows, columns) = at[f"{name}.codes"]
        two_per_byte = 2 if dtype == torch.uint8 else 1
        found.append(Layer(name, rows, columns * two_per_byte, artifact.formats[name], artifact.scheme.inputs))
    return found


def check_kinds(format_name: str, layers: Sequence[Layer], holds: Collection[str], mixed_groups: bool) -> None:
    """The format has a place for every layer's kind, and for several of them or group sizes when there are any."""
    if not layers:
        raise ValueError("no linear is quantized, so there is nothing to export; skip fewer in scheme.skip")
    for layer in layers:
        if layer.kind not in holds:
            raise ValueError(
                f"{layer.name} is {layer.fmt}, which {format_name} cannot hold (it holds {', '.join(sorted(holds))}); "
                "choose another of export.formats"
            )
    usual = Counter(layer.fmt.group_size for layer in layers).most_common(1)[0][0]
    for layer in layers:
        if not mixed_groups and layer.fmt.group_size != usual:
            raise ValueError(
                f"{layer.name} is {layer.fmt} where most have group size {usual}: {format_name} has one for the whole "
                "model; leave out scheme.overrides or export compressed_tensors"
            )


def check_cache(format_name: str, artifact: Artifact) -> None:
    """Refuse KV-cache scales, for a format whose reader in the engines would drop them without a word."""
    if artifact.scheme.kv_cache is not None:
        raise ValueError(
            f"{format_name} has no place for KV-cache scales, and engines would run the cache at scale 1; set "
            "scheme.kv_cache to null or export compressed_tensors"
        )


def check_slots(format_name: str, carrier: Carrier) -> None:
    """Refuse biases that only tare-vllm loads, for a format that it does not read."""
    if carrier.by_plugin:
        raise ValueError(
            f"{format_name} has no place for the biases of {', '.join(sorted(carrier.by_plugin))}, which "
            f"{carrier.arch.class_name} does not declare; export awq, gptq or compressed_tensors for vllm_plugin"
        )


def check_range(format_name: str, artifact: Artifact, dtype: torch.dtype) -> None:
    """Tensors that are stored as they are stay finite in the dtype that engines load them in."""
    most = torch.finfo(dtype).max
    parts = {f"{name}.{part}" for name in artifact.formats for part in ("codes", "scale", "zero", "input_scale")}
    for name, (held, _) in stored(artifact).items():
        if name not in parts and held in (torch.bfloat16, torch.float32) and torch.finfo(held).max > most:
            largest = artifact.raw(name).abs().max().item()
            if largest > most:
                raise ValueError(
                    f"{name} holds {largest:.6g}, but {format_name} would be served in {dtype}, at most {most:g}; "
                    "set model.dtype to bfloat16"
                )


def check_shared_scales(who: str, artifact: Artifact, layers: Sequence[Layer], arch: Arch) -> None:
    """Per-tensor scales are equal within linears that read the same input; input scales over all experts."""
    quantized = {layer.name: layer.kind for layer in layers if layer.kind in ("fp8-tensor", "w4a8")}
    for block in sorted({arch.split(name)[0] for name in quantized}):
        for part, groups in (("scale", arch.shared(block)), ("input_scale", arch.one_input_scale(block))):
            if part == "scale" and "w4a8" in quantized.values():  # in groups
                continue
            for group in groups:
                values = {name: artifact.raw(f"{name}.{part}").item() for name in group if name in quantized}
                if len(set(values.values())) > 1:
                    shown = sorted(values.items(), key=lambda item: item[1])
                    shown = shown if len(shown) < 4 else [shown[0], shown[-1]]
                    raise ValueError(
                        f"the {part} of {', '.join(f'{n} is {v:.6g}' for n, v in shown)}: engines of {who} "
                        "take the largest for all and round the weights again; calibrate them with a shared scale"
                    )
