"""compressed-tensors: pack-quantized int4 and int8, int-quantized w8a8, float-quantized fp8; words are unpacked by the
library's own function.

int4   X.weight_packed int32 [N, K / 8], X.weight_scale [N, K / g], X.weight_shape int64 [2] = (N, K),
       asymmetric: X.weight_zero_point int32 [N / 8, K / g], packed along N
int8   the same with X.weight_packed int32 [N, K / 4]
w8a8   X.weight int8 [N, K], X.weight_scale [N, 1]
fp8    X.weight float8 E4M3 [N, K], X.weight_scale [N, 1] per channel, [1] per tensor, [ceil N / 128, ceil K / 128] in
       blocks; static activations: X.input_scale [1]
fp8 KV cache   A.k_scale and A.v_scale float32 [1] of each attention A
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from torch import Tensor

from gate.readers._export import BLOCK, FLOATS, BrokenRule, Export, InputQuant, Shape, Spec, fits

PER_TOKEN = {("int", 8, "token", True): "int8-token", ("float", 8, "token", True): "token"}
IN_GROUPS = {("float", 8, "group", True): "group"}
STATIC = {("float", 8, "tensor", False): "static"}
# (type, num_bits, strategy) of weights -> the `format` that stores them, which inputs they may have beside none
KNOWN: dict[tuple[Any, ...], tuple[str, dict[tuple[Any, ...], str]]] = {
    ("int", 4, "group"): ("pack-quantized", {}),
    ("int", 4, "channel"): ("pack-quantized", {}),
    ("int", 8, "group"): ("pack-quantized", {}),
    ("int", 8, "channel"): ("pack-quantized", PER_TOKEN),  # int-quantized beside quantized inputs
    ("float", 8, "channel"): ("float-quantized", PER_TOKEN),
    ("float", 8, "tensor"): ("float-quantized", PER_TOKEN | STATIC),
    ("float", 8, "block"): ("float-quantized", IN_GROUPS),
}
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


class Args(Shape):
    type: str | None = None
    num_bits: int | None = None
    strategy: str | None = None
    group_size: int | None = None


class Group(Shape):
    targets: list[str]
    weights: Args
    input_activations: Args | None = None


class Config(Shape):
    config_groups: dict[str, Group] | None = None
    ignore: list[str] | None = None
    kv_cache_scheme: dict[str, Any] | None = None


class Reader(Export):
    """A directory in the compressed-tensors format."""

    PARTS = frozenset({"weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "input_scale"})
    SHAPE = Config

    def check(self) -> None:
        groups = self.quantization.get("config_groups") or {}
        if not groups:
            raise ValueError(f"{self.folder}: compressed-tensors without config_groups; write at least one")
        for name, group in groups.items():
            weights, inputs = group.get("weights") or {}, group.get("input_activations")
            kind = (weights.get("type"), weights.get("num_bits"), weights.get("strategy"))
            stored_as = group.get("format") or self.quantization.get("format")
            packed, pairs = KNOWN.get(kind, ("", {}))
            right = "int-quantized" if inputs and kind[0] == "int" else packed
            if kind not in KNOWN or stored_as != right:
                known = "; ".join(f"{k} as {v}" for k, (v, _) in KNOWN.items())
                raise ValueError(
                    f"{self.folder}: weights {kind} as {stored_as!r} in {name} are not read; known: {known}"
                )
            if kind[2] == "block" and weights.get("block_structure") != [BLOCK, BLOCK]:
                raise ValueError(
                    f"{self.folder}: blocks of {weights.get('block_structure')} in {name}; 128 x 128 is read"
                )
            if inputs and (_kind(inputs) not in pairs or _kind(inputs)[0] != kind[0]):
                raise ValueError(
                    f"{self.folder}: input_activations {inputs} beside weights {kind} in {name} are not read; "
                    f"(type, num_bits, strategy, dynamic) {', '.join(map(str, pairs)) or 'none'} are"
                )
            if inputs and inputs["strategy"] == "group" and inputs.get("group_size") != BLOCK:
                raise ValueError(
                    f"{self.folder}: inputs in groups of {inputs.get('group_size')} in {name}; 128 is read"
                )
        cache = self.quantization.get("kv_cache_scheme")
        if cache and (wrong := {key: cache.get(key) for key, right in CACHE.items() if cache.get(key) != right}):
            raise ValueError(f"{self.folder}: kv_cache_scheme with {wrong} is not read; {CACHE} is what engines run")
        for name in self.linears:
            self._group(name)

    def _group(self, name: str) -> dict[str, Any]:
        """The config group of a linear: exact name before regular expression before class name."""
        groups: list[dict[str, Any]] = list(self.quantization["config_groups"].values())
        for is_meant in (
            lambda target: target == name,
            lambda target: target.startswith("re:") and fits(target[3:], name),
            lambda target: target == "Linear",
        ):
            for group in groups:
                if any(is_meant(target) for target in group["targets"]):
                    return group
        raise ValueError(f"{self.folder}: {name} is stored quantized, yet no config group targets it; add it")

    def _weights(self, name: str) -> dict[str, Any]:
        weights: dict[str, Any] = self._group(name)["weights"]
        return weights

    def excluded(self, name: str) -> bool:
        ignored = self.quantization.get("ignore") or []
        return any(fits(i[3:], name) if i.startswith("re:") else i == name for i in ignored)

    def group_size(self, name: str) -> int | None:
        args = self._weights(name)
        return int(args["group_size"]) if args["strategy"] == "group" else None

    def in_blocks(self, name: str) -> bool:
        return bool(self._weights(name)["strategy"] == "block")

    def stored_as(self, name: str) -> str:
        args = self._weights(name)
        return f"{args['type']}{args['num_bits']} per {args['strategy']} {super().stored_as(name)}"

    def has_cache_scales(self) -> bool:
        return bool(self.quantization.get("kv_cache_scheme"))

    def layout(self, name: str, rows: int, columns: int) -> dict[str, Spec]:
        args = self._weights(name)
        if args["type"] == "float" or self._group(name).get("input_activations"):
            blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
            shapes = {"channel": ((rows, 1),), "block": (blocks,), "tensor": ((1,), ())}
            parts = {
                "weight": Spec(("F8_E4M3" if args["type"] == "float" else "I8",), ((rows, columns),)),
                "weight_scale": Spec(FLOATS, shapes[args["strategy"]]),
            }
            if self._is_static(name):
                parts["input_scale"] = Spec(FLOATS, ((1,), ()))
            return parts
        groups = columns // (self.group_size(name) or columns)
        parts = {
            "weight_packed": Spec(("I32",), ((rows, columns * args["num_bits"] // 32),)),
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
        bits: int = self._weights(name)["num_bits"]
        signed = unpack_from_int32(self.raw(f"{name}.weight_packed"), bits, shape)
        return signed.contiguous() if bits == 8 else (signed + 8).to(torch.uint8).contiguous()

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
        how = _kind(self._group(name)["input_activations"])
        dynamic: InputQuant = (PER_TOKEN | IN_GROUPS).get(how)  # type: ignore[assignment]
        return self.raw(f"{name}.input_scale").float().view(()) if how in STATIC else dynamic


def _kind(inputs: dict[str, Any]) -> tuple[Any, Any, Any, bool]:
    """(type, num_bits, strategy, dynamic) of quantized activations."""
    return inputs.get("type"), inputs.get("num_bits"), inputs.get("strategy"), bool(inputs.get("dynamic", True))
