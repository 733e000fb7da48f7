"""ModelOpt FP8, per tensor, static: the directory that vLLM and TensorRT-LLM both load.

    X.weight float8 E4M3 [N, K], X.weight_scale and X.input_scale float32, one value

TensorRT-LLM reads hf_quant_config.json; vLLM reads `quantization_config` of config.json, and the other file without it.
"""

from __future__ import annotations

import json
from fnmatch import fnmatchcase

from torch import Tensor

from gate.readers._export import Export, InputQuant, Spec


class Reader(Export):
    """A directory in ModelOpt's FP8 format."""

    PARTS = frozenset({"weight_scale", "input_scale"})

    def check(self) -> None:
        self.exclude: dict[str, list[str]] = {}
        algorithms = {}
        path = self.folder / "hf_quant_config.json"
        if not path.is_file():
            raise ValueError(f"{self.folder} has no hf_quant_config.json, the file TensorRT-LLM reads; write it")
        sides = {path.name: json.loads(path.read_text(encoding="utf-8")).get("quantization") or {}}
        if self.quantization:
            sides["config.json"] = self.quantization
        for file, side in sides.items():
            algorithms[file] = side.get("quant_algo")
            self.exclude[file] = side.get("exclude_modules", side.get("ignore")) or []
        if set(algorithms.values()) != {"FP8"}:
            raise ValueError(f"{self.folder}: quant_algo is {algorithms}; the gate reads FP8, the same in every file")
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
        one = Spec(("F32",), ((), (1,)))
        return {"weight": Spec(("F8_E4M3",), ((rows, columns),)), "weight_scale": one, "input_scale": one}

    def shared(self) -> tuple[str, ...]:
        return ("weight_scale", "input_scale")

    def codes(self, name: str) -> Tensor:
        return self.raw(f"{name}.weight")

    def scale(self, name: str) -> Tensor:
        return self.raw(f"{name}.weight_scale").float().view(1, 1)

    def input_quant(self, name: str) -> InputQuant:
        return self.raw(f"{name}.input_scale").float().view(()) if name in self.linears else None
