"""A random teacher and its rounding to nearest, ready to be trained: for tests of the loop and of the stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from qat import loop
from qat.artifact import Artifact, block_file, block_tensors, save_tensors
from qat.checkpoint import SafetensorsFolder
from qat.micro import make_micro
from qat.model import Model
from qat.parent import Parent
from qat.quant import Quantized, grouped, max_scale, quantize, scale_to_grid
from qat.sections import Train
from qat.student import Student
from qat.teacher import Resident
from tests.artifacts import ALL, make

LENGTH, RATES = 16, {"bias": 3e-3, "scale": 3e-3}
DEFAULTS: dict[str, Any] = {"loss": {"kl": 1.0}, "steps": 6, "batch": 4, "warmup": 2,
                            "temperature": 1.0, "seed": 5, "save_every": 1}  # fmt: skip


class Bench:
    """A random teacher and its rounding to nearest, with scales a tenth too large: there is much to learn."""

    def __init__(self, root: Path) -> None:
        self.parent = Parent(make_micro(root / "micro"), "micro")
        self.start = root / "start"
        artifact, tensors = make(self.start, self.parent.config), self.parent.tensors
        for index in range(2):
            path = self.start / block_file(index)
            stored = {name: tensors.get(name) for name in load_file(path) if name in tensors.names()}
            for name in (name for name in artifact.formats if name.startswith(f"model.layers.{index}.")):
                weight, fmt = tensors.get(f"{name}.weight").float(), artifact.formats[name]
                scale = max_scale(grouped(weight, 32).abs().amax(-1), fmt)
                q = Quantized(quantize(weight, scale, None, fmt), scale_to_grid(scale * 1.1))
                stored |= block_tensors(name, q, None, None)
            save_tensors(stored, path)
        self.windows = torch.randint(257, (23, LENGTH), generator=torch.Generator().manual_seed(1))

    def pair(self, learn: Any = RATES) -> tuple[Model, Student]:
        teacher = Model(self.parent.config, SafetensorsFolder(self.parent.folder), resident=True)
        return teacher, Student(teacher, Artifact(self.start), Train(learn=learn).learn, ALL)

    def train(self, folder: Path, accelerator: Any = None, **changes: Any) -> tuple[Student, dict[str, Any]]:
        folder.mkdir(exist_ok=True)
        rates, micro_batch = changes.pop("rates", RATES), changes.pop("micro_batch", None)
        more = {"progress": changes.pop("progress")} if "progress" in changes else {}
        teacher, student = self.pair(rates)
        how = Train(learn=rates, length=LENGTH, **DEFAULTS | changes)
        accelerator = accelerator or Accelerator(cpu=True, mixed_precision="no")
        history = loop.train(
            accelerator, Resident(teacher), student, self.windows, folder, how, micro_batch=micro_batch, **more
        )
        return student, history
