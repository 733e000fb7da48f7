"""ModelOpt FP8: the directory that vLLM and TensorRT-LLM both load.

    FP8         X.weight float8 E4M3 [N, K], X.weight_scale and X.input_scale float32, one value
    FP8_PB_WO   X.weight float8 E4M3 [N, K], X.weight_scale float32 [N / 128, 1, K / 128, 1]; inputs are rounded while
                serving, in groups of 128
    fp8 KV cache   A.k_proj.k_scale and A.v_proj.v_scale float32, one value, of each attention A

TensorRT-LLM reads hf_quant_config.json; vLLM reads `quantization_config` of config.json, and the other file without it.
"""

from __future__ import annotations

import json
from fnmatch import fnmatchcase

from torch import Tensor

from gate.readers._export import BLOCK, Export, InputQuant, Spec

CACHE = {"type": "float", "num_bits": 8}  # what config.json calls FP8


class Reader(Export):
    """A directory in ModelOpt's FP8 format."""

    PARTS = frozenset({"weight_scale", "input_scale"})

    def check(self) -> None:
        self.exclude: dict[str, list[str]] = {}
        algorithms, caches = {}, {}
        path = self.folder / "hf_quant_config.json"
        if not path.is_file():
            raise ValueError(f"{self.folder} has no hf_quant_config.json, the file TensorRT-LLM reads; write it")
        sides = {path.name: json.loads(path.read_text(encoding="utf-8")).get("quantization") or {}}
        if self.quantization:
            sides["config.json"] = self.quantization
        for file, side in sides.items():
            algorithms[file] = side.get("quant_algo")
            cache = side.get("kv_cache_quant_algo") or side.get("kv_cache_scheme")
            caches[file] = "FP8" if isinstance(cache, dict) and CACHE.items() <= cache.items() else cache
            self.exclude[file] = side.get("exclude_modules", side.get("ignore")) or []
        if set(algorithms.values()) not in ({"FP8"}, {"FP8_PB_WO"}):
            raise ValueError(
                f"{self.folder}: quant_algo is {algorithms}; the gate reads FP8 or FP8_PB_WO, the same in every file"
            )
        if list(caches.values()).count("FP8") not in (0, len(caches)) or any(
            c not in (None, "FP8") for c in caches.values()
        ):
            raise ValueError(f"{self.folder}: the KV cache is {caches}; FP8 or nothing is read, the same in every file")
        self._algorithm, self._cache = algorithms[path.name], caches[path.name]
        self._check_agreement()

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

    def layout(self, name: str, rows: int, columns: int) -> dict[str, Spec]:
        weight, one = Spec(("F8_E4M3",), ((rows, columns),)), Spec(("F32",), ((), (1,)))
        if self._algorithm == "FP8":
            return {"weight": weight, "weight_scale": one, "input_scale": one}
        blocks = (-(-rows // BLOCK), 1, -(-columns // BLOCK), 1)
        return {"weight": weight, "weight_scale": Spec(("F32",), (blocks,))}

    def shared(self) -> tuple[str, ...]:
        return ("weight_scale", "input_scale") if self._algorithm == "FP8" else ()

    def in_blocks(self, name: str) -> bool:
        return self._algorithm == "FP8_PB_WO"

    def has_cache_scales(self) -> bool:
        return self._cache is not None

    def cache_names(self, index: int) -> tuple[str, str]:
        attention = f"{self.arch.blocks}.{index}.self_attn"
        return f"{attention}.k_proj.k_scale", f"{attention}.v_proj.v_scale"

    def codes(self, name: str) -> Tensor:
        return self.raw(f"{name}.weight")

    def scale(self, name: str) -> Tensor:
        scale = self.raw(f"{name}.weight_scale").float()
        return scale[:, 0, :, 0] if self.in_blocks(name) else scale.view(1, 1)

    def input_quant(self, name: str) -> InputQuant:
        if name not in self.linears:
            return None
        return "group" if self.in_blocks(name) else self.raw(f"{name}.input_scale").float().view(())
