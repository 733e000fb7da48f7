"""compressed-tensors: pack-quantized int4 and float-quantized fp8, unpacked by the library's own function.

int4   X.weight_packed int32 [N, K / 8], X.weight_scale [N, K / g], X.weight_shape int64 [2] = (N, K),
       asymmetric: X.weight_zero_point int32 [N / 8, K / g], packed along N
fp8    X.weight float8 E4M3 [N, K], X.weight_scale [N, 1] per channel or [1] per tensor,
       static activations: X.input_scale [1]
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from torch import Tensor

from gate.readers._export import FLOATS, BrokenRule, Export, InputQuant, Spec

KNOWN = {  # (type, num_bits, strategy) -> the `format` that stores it
    ("int", 4, "group"): "pack-quantized",
    ("int", 4, "channel"): "pack-quantized",
    ("float", 8, "channel"): "float-quantized",
    ("float", 8, "tensor"): "float-quantized",
}


class Reader(Export):
    """A directory in the compressed-tensors format."""

    PARTS = frozenset({"weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "input_scale"})

    def check(self) -> None:
        groups = self.quantization.get("config_groups") or {}
        if not groups:
            raise ValueError(f"{self.folder}: compressed-tensors without config_groups; write at least one")
        for name, group in groups.items():
            weights, inputs = group.get("weights") or {}, group.get("input_activations")
            kind = (weights.get("type"), weights.get("num_bits"), weights.get("strategy"))
            stored_as = group.get("format") or self.quantization.get("format")
            if kind not in KNOWN or stored_as != KNOWN[kind]:
                known = "; ".join(f"{k} as {v}" for k, v in KNOWN.items())
                raise ValueError(
                    f"{self.folder}: weights {kind} as {stored_as!r} in {name} are not read; known: {known}"
                )
            if inputs and (kind[0] != "float" or (inputs.get("type"), inputs.get("num_bits")) != ("float", 8)):
                raise ValueError(
                    f"{self.folder}: input_activations {inputs} in {name} are not read; fp8 beside fp8 are"
                )
        for name in self.linears:
            self._group(name)

    def _group(self, name: str) -> dict[str, Any]:
        """The config group of a linear: exact name before regular expression before class name."""
        groups: list[dict[str, Any]] = list(self.quantization["config_groups"].values())
        for fits in (
            lambda target: target == name,
            lambda target: target.startswith("re:") and re.match(target[3:], name),
            lambda target: target == "Linear",
        ):
            for group in groups:
                if any(fits(target) for target in group["targets"]):
                    return group
        raise ValueError(f"{self.folder}: {name} is stored quantized, yet no config group targets it; add it")

    def _weights(self, name: str) -> dict[str, Any]:
        weights: dict[str, Any] = self._group(name)["weights"]
        return weights

    def excluded(self, name: str) -> bool:
        ignored = self.quantization.get("ignore") or []
        return any(re.match(i[3:], name) if i.startswith("re:") else i == name for i in ignored)

    def group_size(self, name: str) -> int | None:
        args = self._weights(name)
        return int(args["group_size"]) if args["strategy"] == "group" else None

    def layout(self, name: str, rows: int, columns: int) -> dict[str, Spec]:
        args = self._weights(name)
        if args["type"] == "float":
            per_channel = args["strategy"] == "channel"
            parts = {
                "weight": Spec(("F8_E4M3",), ((rows, columns),)),
                "weight_scale": Spec(FLOATS, ((rows, 1),) if per_channel else ((1,), ())),
            }
            if self._is_static(name):
                parts["input_scale"] = Spec(FLOATS, ((1,), ()))
            return parts
        groups = columns // (self.group_size(name) or columns)
        parts = {
            "weight_packed": Spec(("I32",), ((rows, columns // 8),)),
            "weight_scale": Spec(("F16", "BF16"), ((rows, groups),)),
            "weight_shape": Spec(("I64", "I32"), ((2,),)),
        }
        if not args.get("symmetric", True):
            parts["weight_zero_point"] = Spec(("I32",), ((rows // 8, groups),))
        return parts

    def shared(self) -> tuple[str, ...]:
        groups = self.quantization["config_groups"].values()
        is_per_tensor = any(group["weights"]["strategy"] == "tensor" for group in groups)
        return ("weight_scale", "input_scale") if is_per_tensor else ()

    def broken_rules(self, name: str, rows: int, columns: int) -> Iterator[BrokenRule]:
        if f"{name}.weight_shape" in self.stored:
            shape = self.raw(f"{name}.weight_shape").tolist()
            if shape != [rows, columns]:
                rule = f"the weight is ({rows}, {columns}), which is what the library unpacks to"
                yield BrokenRule("weight_shape", str(shape), rule, "write the unpacked shape")

    def codes(self, name: str) -> Tensor:
        if f"{name}.weight_packed" not in self.stored:
            return self.raw(f"{name}.weight")
        shape = torch.Size(self.raw(f"{name}.weight_shape").tolist())
        signed = unpack_from_int32(self.raw(f"{name}.weight_packed"), 4, shape)
        return (signed + 8).to(torch.uint8).contiguous()

    def zero(self, name: str) -> Tensor | None:
        if f"{name}.weight_zero_point" not in self.stored:
            return None
        shape = self.stored[f"{name}.weight_scale"].shape
        signed = unpack_from_int32(self.raw(f"{name}.weight_zero_point"), 4, torch.Size(shape), packed_dim=0)
        return (signed + 8).to(torch.uint8).contiguous()

    def scale(self, name: str) -> Tensor:
        scale = self.raw(f"{name}.weight_scale").float()
        return scale if scale.ndim == 2 else scale.view(1, 1)

    def _is_static(self, name: str) -> bool:
        inputs = self._group(name).get("input_activations") or {}
        return inputs.get("dynamic", True) is False

    def input_quant(self, name: str) -> InputQuant:
        if name not in self.linears or not self._group(name).get("input_activations"):
            return None
        return self.raw(f"{name}.input_scale").float().view(()) if self._is_static(name) else "token"
