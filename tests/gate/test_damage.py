"""The trained demo model with the scales of one block 5% off, judged without an artifact: by KL alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from gate import divergence, lint, perplexity, stage
from gate.stage import Exported
from qat.plugins import ROOT
from qat.sections import Text
from qat.tokens import windows
from tests.judging import judge

DEMO = ROOT / "recipes/demo/model"


def int8(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return torch.round(weight / scale) * scale


def checkpoint(folder: Path, factor: float) -> Path:
    """A plain checkpoint with int8 values in every linear, those of block 2 times `factor`: what another tool made."""
    shutil.copytree(DEMO, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, value in tensors.items():
        if name.startswith("model.layers.") and value.ndim == 2:
            tensors[name] = int8(value.float()) * (factor if name.startswith("model.layers.2.") else 1.0)
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def found(on_one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("damage")
    shutil.copytree(DEMO, folder / "copy")
    exports = [
        Exported("good", checkpoint(folder / "good", 1.0), ()),
        Exported("damaged", checkpoint(folder / "damaged", 1.05), ()),
        Exported("copy", folder / "copy", ()),
    ]
    gate = {
        "lint": lint.Options(),
        "divergence": divergence.Options(max_kl=0.01),
        "perplexity": perplexity.Options(max_relative_increase=0.5),
    }
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    text = windows(tokenizer, Text(source=str(ROOT / "recipes/demo/text/evaluation.txt")), 96, 32).windows
    path = folder / "verdict.json"
    judge(path, stage.plain_state("parent", DEMO), [], exports, text, gate, folder / "cache")
    return json.loads(path.read_text())


def test_scales_of_one_block_off_by_five_percent_are_refused_by_kl(found: dict[str, Any]) -> None:
    assert {name: export["status"] for name, export in found["exports"].items()} == {
        "good": "released", "damaged": "refused", "copy": "released",
    }  # fmt: skip
    assert found["exports"]["damaged"]["faults"] == []
    outcomes = {check["name"]: check["outcome"] for check in found["exports"]["damaged"]["checks"]}
    assert outcomes == {"divergence.max_kl": "failed", "perplexity.max_relative_increase": "passed"}


def test_a_copy_of_the_parent_differs_by_exactly_nothing(found: dict[str, Any]) -> None:
    for check in found["exports"]["copy"]["checks"]:
        assert (check["value"], check["low"], check["high"]) == (0, 0, 0)
