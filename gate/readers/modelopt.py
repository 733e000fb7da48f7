"""ModelOpt: the directory that TensorRT-LLM loads, and vLLM too where it holds fp8.

    FP8                        X.weight float8 E4M3 [N, K], X.weight_scale and X.input_scale float32, one value
    FP8_PER_CHANNEL_PER_TOKEN  X.weight float8 E4M3 [N, K], X.weight_scale float32 [N]
    FP8_PB_WO                  X.weight float8 E4M3 [N, K], X.weight_scale float32 [N / 128, 1, K / 128, 1]; inputs are
                               rounded while serving, in groups of 128
    W4A16_AWQ                  X.weight uint8 [N / 2, K]: byte [j, k] is row 2 j in its low bits and row 2 j + 1 in its
                               high ones, -8..7; X.weight_scale [N, K / g]; X.pre_quant_scale [K], by which the
                               inputs are multiplied, of linears that share their input with no other
    W4A8_AWQ                   the same, X.weight_scale_2 (largest weight / 448) and X.input_scale float32, one value
    fp8 KV cache               A.k_proj.k_scale and A.v_proj.v_scale float32, one value, of each attention A

TensorRT-LLM reads hf_quant_config.json; vLLM reads `quantization_config` of config.json, and the other file without it.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

import torch
from torch import Tensor

from gate.readers._export import BLOCK, FLOATS, Export, InputQuant, Shape, Spec
from qat.manifest import read_json

CACHE = {"type": "float", "num_bits": 8}  # what config.json calls FP8
INT4 = ("W4A16_AWQ", "W4A8_AWQ")
KNOWN = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", *INT4)
ONE = Spec(("F32",), ((), (1,)))


class Config(Shape):
    group_size: int | None = None
    exclude_modules: list[str] | None = None
    ignore: list[str] | None = None


class Reader(Export):
    """A directory in ModelOpt's format. algorithm: its `quant_algo`."""

    PARTS = frozenset({"weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale"})
    SHAPE = Config

    def check(self) -> None:
        self.exclude: dict[str, list[str]] = {}
        algorithms, caches = {}, {}
        path = self.folder / "hf_quant_config.json"
        if not path.is_file():
            raise ValueError(f"{self.folder} has no hf_quant_config.json, the file TensorRT-LLM reads; write it")
        legacy = read_json(path).get("quantization") or {}
        self._check_shape(legacy)
        sides = {path.name: legacy} | ({"config.json": self.quantization} if self.quantization else {})
        for file, side in sides.items():
            algorithms[file] = str(side.get("quant_algo")).upper()  # Model-Optimizer itself writes fp8_pb_wo
            cache = side.get("kv_cache_quant_algo") or side.get("kv_cache_scheme")
            caches[file] = "FP8" if isinstance(cache, dict) and CACHE.items() <= cache.items() else cache
            self.exclude[file] = side.get("exclude_modules", side.get("ignore")) or []
        self.algorithm, self._cache = algorithms[path.name], caches[path.name]
        if len(set(algorithms.values())) > 1 or self.algorithm not in KNOWN:
            raise ValueError(
                f"{self.folder}: quant_algo is {algorithms}; the gate reads {', '.join(KNOWN)}, the same in every file"
            )
        if list(caches.values()).count("FP8") not in (0, len(caches)) or any(
            c not in (None, "FP8") for c in caches.values()
        ):
            raise ValueError(f"{self.folder}: the KV cache is {caches}; FP8 or nothing is read, the same in every file")
        self._group_size = self._read_group_size(legacy)
        if self._group_size and (legacy.get("has_zero_point") or self.quantization.get("has_zero_point")):
            raise ValueError(
                f"{self.folder}: {self.algorithm} with has_zero_point true; TensorRT-LLM's int4 linears have no zero "
                "points: quantize symmetrically"
            )
        self._check_agreement()

    def _read_group_size(self, legacy: dict[str, object]) -> int | None:
        if self.algorithm not in INT4:
            return None
        size, inline = legacy.get("group_size"), self.quantization.get("group_size")
        if not isinstance(size, int) or size <= 0 or inline not in (None, size):
            raise ValueError(
                f"{self.folder}: {self.algorithm} with group_size {size} in hf_quant_config.json and {inline} in "
                "config.json; TensorRT-LLM needs the true one in the former"
            )
        return size

    def excluded(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.exclude["hf_quant_config.json"])

    def _check_agreement(self) -> None:
        """TensorRT-LLM matches patterns; vLLM also takes an entry for a part of a name: `layers.1` hits `layers.10`."""
        blocks = range(self.config.num_hidden_layers)
        for name in [n for index in blocks for n in self.arch.block_linears(index)] + [self.arch.head]:
            for file, patterns in self.exclude.items():
                if any(fnmatchcase(name, p) or p in name for p in patterns) != self.excluded(name):
                    raise ValueError(
                        f"{self.folder}: TensorRT-LLM and vLLM disagree on whether {file} excludes {name} from "
                        f"quantization; list full names, the same ones in every file"
                    )

    def group_size(self, name: str) -> int | None:
        return self._group_size

    def layout(self, name: str, rows: int, columns: int) -> dict[str, Spec]:
        weight = Spec(("F8_E4M3",), ((rows, columns),))
        if self._group_size:
            parts = {
                "weight": Spec(("U8",), ((rows // 2, columns),)),
                "weight_scale": Spec(FLOATS, ((rows, columns // self._group_size),)),
                "pre_quant_scale": Spec(FLOATS, ((columns,),), required=False),  # gate/engines/trtllm.py knows where
            }
            return parts | ({"weight_scale_2": ONE, "input_scale": ONE} if self.algorithm == "W4A8_AWQ" else {})
        if self.algorithm == "FP8":
            return {"weight": weight, "weight_scale": ONE, "input_scale": ONE}
        blocks = (-(-rows // BLOCK), 1, -(-columns // BLOCK), 1)
        shape = blocks if self.in_blocks(name) else (rows,)
        return {"weight": weight, "weight_scale": Spec(("F32",), (shape,))}

    def shared(self) -> tuple[str, ...]:
        of = {"FP8": ("weight_scale", "input_scale"), "W4A8_AWQ": ("weight_scale_2", "input_scale", "pre_quant_scale")}
        return of.get(self.algorithm, ())

    def in_blocks(self, name: str) -> bool:
        return self.algorithm == "FP8_PB_WO"

    def keeps_float32(self, name: str) -> bool:
        # those of int4 are cast when they are loaded; ModelOpt itself writes float32 that this rounds
        return True

    def has_cache_scales(self) -> bool:
        return self._cache is not None

    def cache_names(self, index: int) -> tuple[str, str]:
        attention = f"{self.arch.blocks}.{index}.self_attn"
        return f"{attention}.k_proj.k_scale", f"{attention}.v_proj.v_scale"

    def codes(self, name: str) -> Tensor:
        stored = self.raw(f"{name}.weight")
        if not self._group_size:
            return stored
        rows = torch.stack([stored & 15, stored >> 4], 1).flatten(0, 1)
        return (rows + 8) & 15  # two's complement, shifted to 0..15

    def scale(self, name: str) -> Tensor:
        scale = self.raw(f"{name}.weight_scale").float()
        if self.algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
            return scale[:, None]
        return scale[:, 0, :, 0] if self.in_blocks(name) else scale if scale.ndim == 2 else scale.view(1, 1)

    def weight(self, name: str) -> Tensor:
        weight = super().weight(name)
        if f"{name}.pre_quant_scale" in self.stored:
            weight *= self.raw(f"{name}.pre_quant_scale").float()
        return weight

    def input_quant(self, name: str) -> InputQuant:
        if name not in self._quantized or self.algorithm == "W4A16_AWQ":
            return None
        if self.algorithm in ("FP8", "W4A8_AWQ"):
            return self.raw(f"{name}.input_scale").float().view(())
        return "group" if self.in_blocks(name) else "token"
