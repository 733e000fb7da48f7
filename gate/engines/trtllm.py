"""What TensorRT-LLM (PyTorch backend, 1.2 and later) refuses or misreads, from configs, headers and a few scalars."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gate._check import Fault
from gate.engines._split import check_ranks, check_unit
from gate.readers import Export

ELSEWHERE = "export modelopt for it"
GROUP_SIZES = (64, 128)


def check(export: Export, tp: int) -> Iterator[Fault]:
    """Faults of a directory that is to be served on `tp` ranks."""
    yield from check_ranks("trtllm", export, tp)
    if export.format in ("awq", "gptq"):
        rule = "trtllm raises NotImplementedError for it"
        yield Fault("engine", "config.json", f"quant_method {export.format}", rule, ELSEWHERE)
    elif export.format == "compressed_tensors":
        yield from _compressed(export)
    elif export.format == "modelopt":
        yield from _modelopt(export, tp)


def _compressed(export: Export) -> Iterator[Fault]:
    groups = export.quantization["config_groups"]
    for key, group in groups.items():
        weights, where = group["weights"], f"config.json {key}"
        kind = (weights["type"], weights["num_bits"], weights["strategy"])
        if kind == ("int", 8, "channel") and group.get("input_activations"):
            rule = "trtllm does not look at the type and runs it as fp8: wrong output without an error"
            yield Fault("engine", where, "int8 weights and inputs", rule, "export it for vllm only")
        elif kind != ("float", 8, "block"):
            rule = "of compressed-tensors trtllm parses fp8 in blocks only"
            yield Fault("engine", where, f"weights {kind}", rule, ELSEWHERE)
        if len(groups) > 1 and any(not t.startswith(("re:", "model.")) for t in group["targets"]):
            rule = "among several groups trtllm takes full names and re: patterns"
            yield Fault("engine", where, f"targets {group['targets']}", rule, "name the linears")
    if export.has_cache_scales():
        yield from _cache(export)


def _modelopt(export: Export, tp: int) -> Iterator[Fault]:
    algorithm: str = export.algorithm  # type: ignore[attr-defined]
    groups = [group for index in range(export.config.num_hidden_layers) for group in _shared(export, index)]
    alone = {group[0] for group in groups if len(group) == 1}
    if export.config.dtype not in (torch.bfloat16, torch.float16, None):
        what, rule = f"dtype {export.config.dtype}".replace("torch.", ""), "trtllm runs bfloat16 and float16 models"
        yield Fault("dtype", "config.json", what, rule, "write the one that scales and biases were rounded to")
    if export.arch.head in export.linears:
        rule = "trtllm keeps it in 16 bits"
        yield Fault("head", export.arch.head, "stored quantized", rule, "leave it unquantized, and exclude it")
    for group in groups:
        yield from _factors(export, group)
    for name in export.linears:
        if algorithm.startswith("W4A"):
            yield from _int4(export, name, name in alone, tp)
        elif export.in_blocks(name):
            yield from check_unit("trtllm", "fp8 blocks", export, name, tp, 128, 128)
        else:
            yield from check_unit("trtllm", "fp8 matrix units", export, name, tp, 16, 16)
    if export.has_cache_scales():
        yield from _cache(export)


def _shared(export: Export, index: int) -> list[list[str]]:
    prefix, here = f"{export.arch.blocks}.{index}.", export.arch.at(index)
    return [[prefix + leaf for leaf in group] for group in here.shared_input]


def _factors(export: Export, group: list[str]) -> Iterator[Fault]:
    """W4A8: all linears that are fused have a factor for their inputs, or none has."""
    lacking = [name for name in group if f"{name}.pre_quant_scale" not in export.stored]
    if export.algorithm == "W4A8_AWQ" and 0 < len(lacking) < len(group):  # type: ignore[attr-defined]
        what = f"no pre_quant_scale, which is not so of all of {', '.join(group)}"
        rule = "trtllm takes that of the first for all that it fuses: wrong output without an error"
        yield Fault("pre_quant_scale", lacking[0], what, rule, "store the same for all")


def _int4(export: Export, name: str, is_alone: bool, tp: int) -> Iterator[Fault]:
    is_w4a8 = f"{name}.weight_scale_2" in export.stored
    size = export.group_size(name)
    if size not in GROUP_SIZES:
        yield Fault(
            "kernel", name, f"group size {size}", f"trtllm's int4 kernels take {GROUP_SIZES}", "use one of them"
        )
    # preprocess_weights_for_mixed_gemm: 64 inputs on Ampere, Ada and Blackwell RTX, 128 of w4a8
    unit = max(128 if is_w4a8 else 64, size or 1)
    yield from check_unit("trtllm", "int4, whole groups", export, name, tp, 64, unit)
    factor = export.stored.get(f"{name}.pre_quant_scale")
    if is_alone and factor is None:
        rule = "trtllm looks it up for linears that are not fused: KeyError"
        yield Fault("pre_quant_scale", name, "no pre_quant_scale", rule, "write ones")
    elif not is_alone and factor is not None and not is_w4a8:
        rule = "trtllm does not read it for fused linears: wrong output without an error"
        yield Fault("pre_quant_scale", name, "pre_quant_scale stored", rule, "fold it into the norm before")
    serving = {"torch.bfloat16": "BF16", "torch.float16": "F16"}.get(str(export.config.dtype))
    if factor is not None and is_w4a8 and factor.dtype != serving:
        rule = f"trtllm asserts the model's dtype, {serving}"
        yield Fault("pre_quant_scale", name, f"pre_quant_scale in {factor.dtype}", rule, "write it in that dtype")


def _cache(export: Export) -> Iterator[Fault]:
    for index in range(export.config.num_hidden_layers):
        for name, scale in zip(export.cache_names(index), export.cache_scales(index) or (), strict=False):
            if scale.item() > 1:
                rule = "trtllm runs an fp8 cache at scale 1, so that larger values than 448 saturate"
                yield Fault("kv_cache", name, f"{scale.item():.4g}", rule, "serve it with a 16-bit cache")
