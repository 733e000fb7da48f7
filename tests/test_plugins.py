"""A file is a plugin, and is read without being imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from qat import plugins


def test_names_are_the_files_that_do_not_start_with_an_underscore(fake_root: Path) -> None:
    assert plugins.names("calibrate.round") == ["nearest"]
    assert plugins.names("calibrate.range") == ["activation", "max", "mse"]
    assert plugins.names("no.such.folder") == []


def test_options_and_constants_are_read_without_importing(fake_root: Path) -> None:
    before = set(sys.modules)
    options = plugins.options("calibrate.range", "mse")  # the file imports a module that does not exist
    assert options().model_dump() == {"grid": 20, "norm": "l2"}
    with pytest.raises(ValidationError, match="norm"):
        options.model_validate({"norm": "l3"})
    assert options is plugins.options("calibrate.range", "mse")
    assert plugins.options("calibrate.range", "activation") is plugins.NoOptions
    assert plugins.options("calibrate.range", "mse", "InputOptions").model_validate({}).model_dump() == {"steps": 9}
    assert plugins.version("calibrate.range", "mse") == 3
    assert plugins.literal("export.formats", "awq", "HOLDS") == {"int4", "int4-asym"}
    assert not [name for name in set(sys.modules) - before if name.startswith(("calibrate", "export"))]


def test_a_changed_file_is_read_again(fake_root: Path) -> None:
    path = fake_root / "calibrate/round/nearest.py"
    assert plugins.version("calibrate.round", "nearest") == 1
    path.write_text("VERSION: int = 2\n")
    assert plugins.version("calibrate.round", "nearest") == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [("x = 1\n", "has no VERSION; every plugin in calibrate/round states it"), ("VERSION = 1 + 1\n", "is computed")],
)
def test_a_constant_that_cannot_be_read_is_an_error(fake_root: Path, text: str, words: str) -> None:
    (fake_root / "calibrate/round/other.py").write_text(text)
    with pytest.raises(ValueError, match="VERSION") as caught:
        plugins.version("calibrate.round", "other")
    assert words in str(caught.value)


def test_an_unknown_name_lists_the_known_ones(fake_root: Path) -> None:
    with pytest.raises(
        ValueError, match=r"there is no gate/lynt\.py, did you mean 'lint'\? \(known: lint, perplexity\)"
    ):
        plugins.find("gate", "lynt")


PACKAGES = ("calibrate.transform", "calibrate.range", "calibrate.round", "export.formats", "export.engines", "gate")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_shipped_plugin_states_its_constants(package: str) -> None:
    assert plugins.names(package)
    for name in plugins.names(package):
        if package != "export.engines":
            assert plugins.version(package, name) >= 1
        assert plugins.options(package, name).model_config["frozen"]
    for name in plugins.names("calibrate.range"):
        has = hasattr(plugins.find("calibrate.range", name), "find_input")
        assert has == bool(plugins.literal("calibrate.range", name, "INPUTS"))
    for name in plugins.names("export.formats"):
        kinds = {"int4", "int4-asym", "int8", "w4a8", "w8a8", "fp8-channel", "fp8-tensor", "fp8-block"}
        assert plugins.literal("export.formats", name, "HOLDS") <= kinds
        assert plugins.literal("export.formats", name, "MIXED_GROUPS") in (True, False)
        assert plugins.literal("export.formats", name, "KV_CACHE") in (True, False)
    for engine in plugins.names("export.engines"):
        for name in plugins.literal("export.engines", engine, "KV_CACHE"):
            assert plugins.literal("export.formats", name, "KV_CACHE")
        for name, kinds in plugins.literal("export.engines", engine, "LOADS").items():
            plugins.check("export.formats", name)
            assert kinds <= plugins.literal("export.formats", name, "HOLDS")


@pytest.mark.parametrize(
    ("called", "meant"),
    [
        ("tensorrt", "trtllm"),
        ("tensorrt_llm", "trtllm"),
        ("TensorRT-LLM", "trtllm"),
        ("hf", "transformers"),
        ("vlm", "vllm"),
    ],
)
def test_an_engine_is_suggested_by_what_people_call_it(called: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean '{meant}'"):
        plugins.check("export.engines", called)
