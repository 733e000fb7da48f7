"""`tare lint` says what is wrong with a directory, whatever its bytes are: no traceback, no long wait, nothing written.

`FUZZ=20000 pytest --hypothesis-profile default` looks longer, for other examples.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from export.stage import run
from gate import lint
from gate._check import Fault
from qat.checkpoint import INDEX
from tests.artifacts import SCHEMES, config_of, make

EXAMPLES = int(os.environ.get("FUZZ", "25"))
FUZZ = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
SECONDS = 5
# format, scheme, bytes of a shard
DIRECTORIES = {
    "awq": ("awq", "int4-asym", 30_000),
    "gptq": ("gptq", "int4", 10**9),
    "compressed_tensors": ("compressed_tensors", "int4", 10**9),
    "w8a8": ("compressed_tensors", "w8a8", 10**9),
    "modelopt": ("modelopt", "fp8-tensor", 10**9),
    "dense": ("dense", "int4", 30_000),
}
WORDS = ["", "awq", "gptq", "tare", "modelopt", "compressed-tensors", "llama", "mixtral", "float", "int", "group"]
WORDS += ["re:[", "-:(", "*", "../up", "\ud800", "a\0b", "x" * 300, "bfloat16", "load", "model.layers.0.mlp.up_proj"]
NUMBERS = [0, -1, 1, 2, 3, 7, 4.0, 0.5, 2**31, 2**63, 10**30, -(10**30), 1e308, math.nan, math.inf]
scalars = st.none() | st.booleans() | st.sampled_from(NUMBERS) | st.sampled_from(WORDS) | st.text(max_size=4)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=3),
    max_leaves=6,
)
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories without a fault, by name."""
    root = tmp_path_factory.mktemp("sound")
    made = {}
    for name, (form, scheme, shard) in DIRECTORIES.items():
        artifact = make(root / f"{name}-artifact", config_of("llama"), SCHEMES[scheme])
        made[name] = run(artifact.path, [form], ["transformers"], shard, root / name)[form]
        assert lint.check(made[name], ["transformers"]) == []
    return made


def listed(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check(folder: Path) -> list[Fault]:
    """The faults of a folder that stands alone in its parent folder; nothing there is written."""
    before, start = listed(folder.parent), time.monotonic()
    faults = lint.check(folder, ["vllm", "trtllm", "transformers"], tp=2)
    assert time.monotonic() - start < SECONDS
    assert listed(folder.parent) == before
    assert all(str(fault).strip() for fault in faults)
    return faults


def copied(sound: Path) -> Path:
    """A copy of a directory, in place of the last one, of hard links: files are replaced, not written into."""
    copy = sound.parent.parent / "fuzzed" / "directory"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(sound, copy, copy_function=os.link)
    return copy


def json_files(folder: Path) -> list[Path]:
    """Those that lint reads."""
    return sorted(path for path in folder.glob("*.json") if not path.name.startswith(("tokenizer", "generation")))


def replace(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def changed(value: Any, draw: Callable[[st.SearchStrategy[Any]], Any]) -> Any:
    """`value` with something in it replaced, removed or added."""
    if isinstance(value, dict) and value and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(value)))
        what = draw(st.integers(0, 8))
        if what == 0:
            return {k: v for k, v in value.items() if k != key}
        if what == 1:
            return {**value, draw(st.sampled_from(WORDS)): draw(values)}
        return {**value, key: changed(value[key], draw)}
    if isinstance(value, list) and value and draw(st.booleans()):
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], changed(value[place], draw), *value[place + 1 :]]
    return draw(values)


@pytest.mark.parametrize("name", DIRECTORIES)
@FUZZ
@given(data=st.data())
def test_values_in_json_files(sound: dict[str, Path], name: str, data: st.DataObject) -> None:
    folder = copied(sound[name])
    files = json_files(folder)
    for _ in range(data.draw(st.integers(1, 2))):
        file = data.draw(st.sampled_from(files))
        value = json.loads(file.read_text())
        inner = "quantization_config" if file.name == "config.json" else "quantization"
        if isinstance(value, dict) and inner in value and data.draw(st.booleans()):
            value[inner] = changed(value[inner], data.draw)
        else:
            value = changed(value, data.draw)
        replace(file, json.dumps(value).encode())
    check(folder)


@pytest.mark.parametrize("name", ["awq", "modelopt"])
@FUZZ
@given(data=st.data())
def test_bytes_of_json_files(sound: dict[str, Path], name: str, data: st.DataObject) -> None:
    folder = copied(sound[name])
    files = json_files(folder)
    file = data.draw(st.sampled_from(files))
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.just(len(content)) | st.integers(0, len(content)))
    replace(
        file,
        data.draw(st.sampled_from([b"", b"", b"\xef\xbb\xbf", b"\xff\xfe", b"null", b"[]"])) + bytes(content[:end]),
    )
    check(folder)


@pytest.mark.parametrize("name", ["awq", "dense", "w8a8"])
@FUZZ
@given(data=st.data())
def test_headers_of_shards(sound: dict[str, Path], name: str, data: st.DataObject) -> None:
    folder = copied(sound[name])
    file = data.draw(st.sampled_from(sorted(folder.glob("*.safetensors"))))
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    for _ in range(data.draw(st.integers(0, 2))):
        tensor = data.draw(st.sampled_from(sorted(header))) if isinstance(header, dict) and header else ""
        if tensor and data.draw(st.booleans()):
            header[tensor] = changed(header[tensor], data.draw)
        else:
            header = changed(header, data.draw)
    text = json.dumps(header).encode()
    said = data.draw(st.just(len(text)) | st.integers(0, 2 * len(text)) | st.sampled_from([2**63, 2**64 - 1, 0, 1]))
    body = content[8 + length :]
    replace(file, struct.pack("<Q", said) + text + body[: data.draw(st.just(len(body)) | st.integers(0, len(body)))])
    check(folder)


@pytest.mark.parametrize("name", ["gptq", "modelopt"])
@FUZZ
@given(data=st.data())
def test_bytes_of_shards(sound: dict[str, Path], name: str, data: st.DataObject) -> None:
    folder = copied(sound[name])
    file = next(folder.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 60) | st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    replace(file, bytes(content))
    check(folder)


@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json", INDEX])
@pytest.mark.parametrize("text", [DEEP, '{"a":' * 100_000, "1" * 5000, "NaN", '"a"', "{}", '{"quantization": 1}'])
def test_json_that_is_meant_to_break_readers(sound: dict[str, Path], file: str, text: str) -> None:
    folder = copied(sound["dense" if file == INDEX else "modelopt"])
    replace(folder / file, text.encode())
    assert check(folder)


@pytest.mark.parametrize("pattern", [r"((\w|\.)+)+[!?]", r"(?:(.)|(..)|(...))*\b\B$"])  # of both, re has no end
def test_a_pattern_that_would_never_end(sound: dict[str, Path], pattern: str) -> None:
    folder = copied(sound["compressed_tensors"])
    value = json.loads((folder / "config.json").read_text())
    value["quantization_config"]["ignore"] = [f"re:{pattern}"]
    replace(folder / "config.json", json.dumps(value).encode())
    faults = [str(fault) for fault in check(folder)]
    assert any("takes over 0.5 s" in fault for fault in faults) == pattern.endswith("$")
