"""Exported directories that are no good, as `tare lint` meets them; tests/gate/test_lint*.py has many more faults."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from export.stage import run
from qat.cli import app
from tests.artifacts import config_of, make
from tests.known_bad.case import INDEX, WEIGHTS, Note

UP1 = "model.layers.1.mlp.up_proj"
EMBED = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Planted:
    """A fault in a directory of some format, and pieces of the line that lint says of it."""

    fault: str
    format: str
    spoil: Callable[[Path], Any]
    says: tuple[str, ...]


def tensors(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        change(found)
        save_file({k: v.contiguous() for k, v in found.items()}, folder / WEIGHTS)

    return spoil


def config(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        said = json.loads((folder / "config.json").read_text())
        change(said)
        (folder / "config.json").write_text(json.dumps(said))

    return spoil


def written(name: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(content) and None


def both(*spoils: Callable[[Path], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        for one in spoils:
            one(folder)

    return spoil


def quantized_head(found: dict[str, Tensor]) -> None:
    del found["lm_head.weight"]
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        found[f"lm_head.{part}"] = found[f"{UP1}.{part}"].clone()


def zero_point_of_zero(found: dict[str, Tensor]) -> None:
    """Version 1 stores a zero point less 1: that of 0 is 0xf, and comes back as 16 or 0."""
    found[f"{UP1}.qzeros"][0, 0] = 0x7777777F


def one(name: str, value: float) -> Callable[[dict[str, Tensor]], None]:
    def change(found: dict[str, Tensor]) -> None:
        found[name].view(-1)[0] = value

    return change


CASES = [
    Planted(
        "a zero point of 0 in GPTQ version 1",
        "gptq",
        tensors(zero_point_of_zero),
        (f"{UP1}.qzeros: 0x7777777f in 1 of 24 words", "symmetric codes have the zero word", "weights go into awq"),
    ),
    Planted(
        "GPTQ declared asymmetric",
        "gptq",
        config(lambda said: said["quantization_config"].update(sym=False)),
        ("gptq with sym False is not read", "write sym: True"),
    ),
    Planted(
        "a head that is tied and quantized",
        "gptq",
        both(tensors(quantized_head), config(lambda said: said.update(tie_word_embeddings=True))),
        ("lm_head: stored quantized", "LlamaForCausalLM has no such linear"),
    ),
    Planted(
        "an embedding that float16 cannot hold",
        "awq",
        both(tensors(one(EMBED, 1e6)), config(lambda said: said.update(dtype="float16", torch_dtype="float16"))),
        (f"{EMBED}: 999424 becomes infinite in float16", "config.json says float16", "serve it in bfloat16"),
    ),
    Planted(
        "config.json of an export without architectures",
        "awq",
        config(lambda said: said.pop("architectures")),
        ("architectures None", "engines choose the class by it", "write ['LlamaForCausalLM']"),
    ),
    Planted(
        "architectures of one model, model_type of another",
        "awq",
        config(lambda said: said.update(architectures=["Qwen2ForCausalLM"])),
        ("architectures ['Qwen2ForCausalLM']", "model_type is llama", "write ['LlamaForCausalLM']"),
    ),
    Planted(
        "half a config.json in an export",
        "awq",
        written("config.json", '{"model_'),
        ("config.json is not JSON", "cut short"),
    ),
    Planted(
        "a word instead of the quantization config",
        "compressed_tensors",
        config(lambda said: said.update(quantization_config="awq")),
        ("quantization_config is 'awq', where an object is expected",),
    ),
    Planted(
        "an index that points outside an export",
        "awq",
        written(INDEX, json.dumps({"weight_map": {EMBED: f"../{WEIGHTS}"}})),
        (f"{INDEX} points to '../{WEIGHTS}', outside its folder", "shards must lie beside", "write the index again"),
    ),
]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("exports")
    artifact = make(root / "artifact", config_of("llama"))
    return run(artifact.path, ["awq", "gptq", "compressed_tensors"], ["vllm"], 10**9, root / "out")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fault)
def test_a_directory_that_is_no_good(case: Planted, exports: dict[str, Path], tmp_path: Path, note: Note) -> None:
    folder = shutil.copytree(exports[case.format], tmp_path / case.format)
    assert CliRunner().invoke(app, ["lint", str(folder), "--engine", "vllm"]).exit_code == 0
    case.spoil(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    said = CliRunner().invoke(app, ["lint", str(folder), "--engine", "vllm"])
    assert said.exit_code == 1 and isinstance(said.exception, SystemExit), said.exception
    place = 0
    for piece in case.says:
        assert piece in said.output[place:], (piece, said.output)
        place = said.output.index(piece, place) + len(piece)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    line = next(line for line in said.output.splitlines() if case.says[0] in line)
    note(case.fault, "lint", line.replace(f"{folder}/", "").replace(f"{folder}: ", ""))
