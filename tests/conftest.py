"""Fixtures that several test files share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# as in qat/train.py: read when torch loads
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
from hypothesis import settings

from qat import plugins

# the same examples on every run; `--hypothesis-profile default` looks for new ones
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")

DTYPES = "DTYPES = {'int4', 'int8', 'fp8_e4m3'}\n"
PLUGINS = {
    "calibrate/transform/none.py": f"VERSION = 1\nINPUTS = {{'plain', 'quantized'}}\n{DTYPES}",
    "calibrate/range/activation.py": f"VERSION = 1\nINPUTS: set[str] = set()\n{DTYPES}",
    "calibrate/range/max.py": f"VERSION = 1\nINPUTS = {{'fp8_e4m3'}}\n{DTYPES}",
    "calibrate/range/mse.py": """
from __future__ import annotations
import torch_is_never_imported
from typing import Literal
from pydantic import Field
from qat.scheme import Section
VERSION = 3
DTYPES = {"int4", "fp8_e4m3"}
INPUTS = {"fp8_e4m3"}
class Options(Section):
    grid: int = Field(20, gt=0)
    norm: Literal["l1", "l2"] = "l2"
class InputOptions(Section):
    steps: int = Field(9, gt=0)
""",
    "calibrate/round/nearest.py": f"VERSION = 1\n{DTYPES}",
    "calibrate/round/_helper.py": "VERSION = 1\n",
    "export/formats/awq.py": "VERSION = 1\nHOLDS = {'int4', 'int4-asym'}\nMIXED_GROUPS = False\nKV_CACHE = False\n",
    "export/formats/compressed_tensors.py": (
        "VERSION = 2\nHOLDS = {'int4', 'int4-asym', 'int8', 'fp8-channel', 'fp8-tensor'}\nMIXED_GROUPS = True\n"
        "KV_CACHE = True\n"
    ),
    "export/formats/modelopt.py": "VERSION = 1\nHOLDS = {'fp8-tensor'}\nMIXED_GROUPS = False\nKV_CACHE = True\n",
    "export/formats/dense.py": (
        "VERSION = 1\nHOLDS = {'int4', 'int4-asym', 'int8', 'fp8-channel', 'fp8-tensor'}\nMIXED_GROUPS = True\n"
        "KV_CACHE = False\n"
    ),
    "export/engines/vllm.py": (
        "VERSION = 1\nLOADS = {'awq': {'int4', 'int4-asym'}, 'modelopt': {'fp8-tensor'},\n"
        "         'compressed_tensors': {'int4', 'int8', 'fp8-channel', 'fp8-tensor'}}\n"
        "KV_CACHE = {'compressed_tensors', 'modelopt'}\n"
    ),
    "export/engines/trtllm.py": "VERSION = 1\nLOADS = {'modelopt': {'fp8-tensor'}}\nKV_CACHE = set()\n",
    "gate/perplexity.py": """
from qat.scheme import Section
VERSION = 1
class Options(Section):
    max_relative_increase: float | None = None
    windows: int | None = None
""",
    "gate/lint.py": "VERSION = 1\n",
    "qat/arch/llama.py": "",  # the name: the module is the real one
    **{
        f"qat/learn/{name}.py": f"""
from pydantic import PositiveFloat
from qat.scheme import Section
VERSION = 1
DTYPES = {dtypes}
NEEDS_ZERO = {name == "zero"}
class Options(Section):
    rate: PositiveFloat = 3e-3
"""
        for name, dtypes in (("bias", {"int4", "int8", "fp8_e4m3"}), ("scale", {"int4", "int8"}), ("zero", {"int4"}))
    },
}

RECIPE = """
model: {source: demo}
data:
  calibration: {source: calibration.txt, sequences: 4, length: 16}
  training: {source: training.txt}
  evaluation: {source: evaluation.txt, length: 16}
calibrate: {range: {name: mse, grid: 30}}
train: {steps: 20}
gate: {perplexity: {max_relative_increase: 0.05}, lint:}
"""


@pytest.fixture
def fake_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a few plugins, three texts and recipes/small.yaml, which is the working directory too."""
    return make_root(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def module_root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same, one for all tests of a file."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield make_root(tmp_path_factory.mktemp("root"), monkeypatch)


def make_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in PLUGINS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "recipes" / "demo" / "model").mkdir(parents=True)
    (tmp_path / "recipes" / "small.yaml").write_text(RECIPE)
    for part in ("calibration", "training", "evaluation"):
        (tmp_path / f"{part}.txt").write_text(f"text for {part}\n")
    monkeypatch.setattr(plugins, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
