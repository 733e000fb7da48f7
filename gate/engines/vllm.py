"""What vLLM (0.26 to 0.32) refuses or misreads, from configs and headers: its loaders and the gates of its kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gate._check import Fault
from gate.engines._split import check_ranks, check_unit
from gate.readers import Export

GROUP_SIZES = (None, 32, 64, 128)  # of the Marlin kernels; auto_gptq.py asks their list on every platform


def check(export: Export, tp: int) -> Iterator[Fault]:
    """Faults of a directory that is to be served on `tp` ranks."""
    yield from check_ranks("vllm", export, tp)
    yield from {"gptq": _gptq, "compressed_tensors": _compressed, "modelopt": _modelopt}.get(export.format, _any)(
        export
    )
    groups = (group for index in range(export.config.num_hidden_layers) for group in export.arch.fused(index))
    fused = {name for group in groups if len(group) > 1 for name in group}
    for name in export.linears:
        yield from _kernel(export, name, tp, name in fused)


def _any(export: Export) -> Iterator[Fault]:
    return iter(())


def _gptq(export: Export) -> Iterator[Fault]:
    q = export.quantization
    rules = {"config.json": q} | {f"dynamic {key}": value for key, value in (q.get("dynamic") or {}).items()}
    for where, options in rules.items():
        if options.get("desc_act") and options.get("group_size", q.get("group_size", -1)) != -1:
            rule = "vllm no longer reorders inputs and stops"
            yield Fault(
                "actorder", where, "desc_act true in groups", rule, "quantize with static groups, desc_act false"
            )


def _compressed(export: Export) -> Iterator[Fault]:
    q = export.quantization
    if q.get("sparsity_config"):
        yield Fault("engine", "config.json", "sparsity_config", "vllm dropped sparse checkpoints", "compress it dense")
    for key, group in q["config_groups"].items():
        weights = group["weights"]
        order, where = weights.get("actorder"), f"config.json {key}"
        if order in ("group", "dynamic"):
            rule = "vllm no longer reorders inputs and stops"
            yield Fault("actorder", where, f"actorder {order!r}", rule, "quantize with actorder static")
        elif order and weights["strategy"] != "group":
            rule = f"compressed-tensors refuses it for strategy {weights['strategy']}"
            yield Fault("actorder", where, f"actorder {order!r}", rule, "write null")
    yield from _asymmetric_experts(export)


def _asymmetric_experts(export: Export) -> Iterator[Fault]:
    for name in export.linears:
        if export.arch.experts and f".{export.arch.experts}." in name and f"{name}.weight_zero_point" in export.stored:
            rule = "vllm runs experts in compressed-tensors symmetric only"
            yield Fault("engine", name, "asymmetric", rule, "use awq, or symmetric codes")
            return


def _modelopt(export: Export) -> Iterator[Fault]:
    algorithm: Any = export.algorithm  # type: ignore[attr-defined]
    if algorithm.startswith("W4A"):
        rule = "vllm's modelopt methods hold fp8 and nvfp4, no int4"
        yield Fault(
            "engine", "hf_quant_config.json", f"quant_algo {algorithm}", rule, "export compressed_tensors or awq"
        )


def _kernel(export: Export, name: str, tp: int, is_fused: bool) -> Iterator[Fault]:
    size = export.group_size(name)
    if export.in_blocks(name):
        yield from check_unit("vllm", "fp8 blocks", export, name, tp, 128 if is_fused or tp > 1 else 1, 128)
    elif export.keeps_float32(name):
        yield from check_unit("vllm", "w8a8 matrix units", export, name, tp, 16, 16)
    else:
        if size not in GROUP_SIZES:
            rule = "vllm runs groups of 32, 64, 128 or whole rows"
            yield Fault("kernel", name, f"group size {size}", rule, "use one of them")
        what = "int4 and int8: whole groups, CPU and Exllama kernels"
        yield from check_unit("vllm", what, export, name, tp, 32, size or 32)
