"""The scripts beside a release are valid shell, and hand the engine what they say; `tare serve` starts them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from export.engines import trtllm, vllm
from export.engines._serve_command import command
from export.engines._table import table
from gate import lint
from qat.cli import app

ROOT = Path(__file__).resolve().parent.parent
CONFIG: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    "quantization_config": {"quant_method": "compressed-tensors"},
}
PRINT = '#!/bin/sh\nfor word; do echo "$word"; done\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A release with scripts for both engines; `vllm` and `trtllm-serve` print their arguments, one a line."""
    programs = tmp_path / "bin"
    for path, text in {
        **{f"release/{k}": v for k, v in (vllm.launch("tiny", CONFIG) | trtllm.launch("tiny", CONFIG)).items()},
        "bin/vllm": PRINT,
        "bin/trtllm-serve": PRINT,
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
        (tmp_path / path).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return tmp_path / "release"


def words(folder: Path, engine: str, *more: str, **environment: str) -> list[str]:
    done = subprocess.run(
        command(folder, engine, more), env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_vllm_is_given_what_the_script_says(folder: Path) -> None:
    plain = ["serve", ".", "--served-model-name", "tiny", "--dtype", "bfloat16"]
    assert words(folder, "vllm") == plain
    assert words(folder, "vllm", "--port", "9000") == [*plain, "--port", "9000"]
    assert words(folder, "vllm", CONTEXT="2048", PRIORITY="1") == [
        *plain, "--scheduling-policy", "priority", "--max-model-len", "2048",
    ]  # fmt: skip


@pytest.mark.parametrize("method", ["dynamic", "yarn"])
def test_a_stretched_context_replaces_the_whole_rotary_config(folder: Path, method: str) -> None:
    found = words(folder, "vllm", STRETCH="4", METHOD=method)
    given = json.loads(found[found.index("--hf-overrides") + 1])
    rope = given["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == (method, 4, 50000.0)
    if method == "yarn":
        assert given["max_position_embeddings"] == 16384 and rope["original_max_position_embeddings"] == 4096
    with pytest.raises(subprocess.CalledProcessError):
        words(folder, "vllm", STRETCH="4", METHOD="other")


def test_no_stretch_is_offered_where_the_rotary_embedding_is_another() -> None:
    llama3 = CONFIG | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}}
    assert "STRETCH" not in vllm.launch("tiny", llama3)["serve/vllm.sh"]


def test_a_cache_and_the_plugin_are_asked_for() -> None:
    scheme = {"num_bits": 8, "type": "float"}
    cached = CONFIG | {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}}
    assert "--kv-cache-dtype fp8" in vllm.launch("tiny", cached)["serve/vllm.sh"]
    carried = CONFIG | {"quantization_config": {"quant_method": "tare", "base": {"kv_cache_scheme": scheme}}}
    text = vllm.launch("tiny", carried)["serve/vllm.sh"]
    assert "--kv-cache-dtype fp8" in text and "tare-vllm" in text


def test_tensorrt_llm_is_given_options_that_parse(folder: Path) -> None:
    found = words(folder, "trtllm", "--tp_size", "2", CONTEXT="512")
    assert found[:2] == [".", "--host"] and found[-4:] == ["--max_seq_len", "512", "--tp_size", "2"]
    options = yaml.safe_load((folder / found[found.index("--extra_llm_api_options") + 1]).read_text())
    assert options["kv_cache_config"]["dtype"] == "auto"


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, ("hf_quant_config.json", "an Ada or Hopper GPU")),
        ({"quant_method": "compressed-tensors"}, ("found in config.json", "FP8 in blocks needs")),
        (None, ("# The weights are not quantized; there is no engine to build",)),
    ],
)
def test_the_script_of_tensorrt_llm_says_where_the_quantization_is(quantization: Any, words: tuple[str, ...]) -> None:
    text = trtllm.launch("tiny", CONFIG | {"quantization_config": quantization})["serve/trtllm.sh"]
    assert all(word in text for word in words), text


def test_the_command_says_what_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no serve/\*\.sh; give .*: runs/NAME/release-KEY/FORMAT, or .*VARIANT/F"):
        command(tmp_path / "bin", None, [])
    with pytest.raises(ValueError, match="not exported for 'transformers'; it was for trtllm, vllm"):
        command(folder, "transformers", [])
    monkeypatch.setenv("PATH", "/nowhere")
    result = CliRunner().invoke(app, ["serve", str(folder), "--engine", "vllm"])
    assert result.exit_code == 1 and "there is no vllm on the PATH" in result.output


def test_a_folder_of_formats_is_answered_with_their_names(folder: Path, tmp_path: Path) -> None:
    formats = [tmp_path / "release-0123/awq", tmp_path / "release-0123/fp8/modelopt"]
    for place in (*formats, formats[1] / "trtllm_checkpoint"):  # the last is a part of a release
        place.mkdir(parents=True)
        (place / "config.json").write_text("{}")
        shutil.copytree(folder / "serve", place / "serve")
    (tmp_path / "release-0123/manifest.json").write_text("{}")
    names = f"one of {formats[0]}, {formats[1]}"
    with pytest.raises(ValueError, match=rf"give a released directory: {names}$"):
        command(tmp_path / "release-0123", None, [])
    (fault,) = lint.check(tmp_path / "release-0123", ["vllm"])
    assert fault.way_out == f"checkpoints lie below: give {names}"
    assert "export again" in lint.check(tmp_path / "bin", ["vllm"])[0].way_out


def test_the_readme_has_the_table_that_the_command_prints() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert table() in text
    result = CliRunner().invoke(app, ["engines"])
    assert result.exit_code == 0 and result.output == table()
