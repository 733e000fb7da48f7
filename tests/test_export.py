"""Exported directories, read back by slow readers written from the formats' documentation, and by the libraries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.quant_scheme import QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from export.stage import run
from qat import plugins
from qat.artifact import Artifact
from qat.checkpoint import INDEX, SafetensorsFolder
from qat.coverage import loads
from tests.artifacts import ALL, SCHEMES, WIDE, config_of, make

FORMATS = plugins.names("export.formats")
BIG = 10**9
SOME_BIAS = frozenset({"self_attn.o_proj", "mlp.up_proj"})


def holds(name: str, scheme: str) -> bool:
    if (name, scheme) == ("modelopt", "int4-channel"):  # groups only
        return False
    return scheme.replace("int4-channel", "int4") in plugins.literal("export.formats", name, "HOLDS")


PAIRS = [(name, scheme) for scheme in SCHEMES for name in FORMATS if holds(name, scheme)]


def export(
    tmp_path: Path, name: str, scheme: Any = "int4", family: str = "llama", **options: Any
) -> tuple[Artifact, Path]:
    options = (WIDE if scheme == "fp8-block" else {}) | options
    artifact = make(tmp_path / "artifact", config_of(family, **options), scheme, SOME_BIAS)
    return artifact, run(artifact.path, [name], ["vllm"], BIG, tmp_path / "out")[name]


def read_awq(stored: dict[str, np.ndarray[Any, Any]], name: str) -> tuple[Any, Any, Any]:
    """(codes, zero, scale) of one linear, by AutoAWQ's WQLinear_GEMM."""
    words, zero_words = stored[f"{name}.qweight"], stored[f"{name}.qzeros"]
    rows = words.shape[1] * 8
    codes, zero = np.zeros((rows, words.shape[0]), int), np.zeros((rows, zero_words.shape[0]), int)
    for j in range(words.shape[1]):
        for i, place in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            codes[8 * j + place] = (words[:, j] >> (4 * i)) & 15
            zero[8 * j + place] = (zero_words[:, j] >> (4 * i)) & 15
    return codes, zero, stored[f"{name}.scales"].T


def read_gptq(stored: dict[str, np.ndarray[Any, Any]], name: str) -> tuple[Any, Any, Any]:
    """(codes, zero, scale) of one linear, by AutoGPTQ's QuantLinear."""
    words, zero_words = stored[f"{name}.qweight"], stored[f"{name}.qzeros"]
    codes = np.zeros((words.shape[1], words.shape[0] * 8), int)
    for j in range(words.shape[0]):
        for i in range(8):
            codes[:, 8 * j + i] = (words[j] >> (4 * i)) & 15
    zero = np.zeros((words.shape[1], zero_words.shape[0]), int)
    for j in range(zero_words.shape[1]):
        for i in range(8):
            zero[8 * j + i] = ((zero_words[:, j] >> (4 * i)) & 15) + 1
    groups = codes.shape[1] // zero.shape[1]
    assert stored[f"{name}.g_idx"].tolist() == [k // groups for k in range(codes.shape[1])]
    return codes, zero, stored[f"{name}.scales"].T


def numpy_of(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    tensors = SafetensorsFolder(folder)
    found = ((name, tensors.get(name)) for name in tensors.names())
    return {name: t.float().numpy() if t.is_floating_point() else t.numpy() for name, t in found}


@pytest.mark.parametrize(
    ("name", "scheme"), [pair for pair in PAIRS if pair[0] in ("awq", "gptq") and "int4" in pair[1]]
)
def test_int4_codes_and_weights_come_back(tmp_path: Path, name: str, scheme: str) -> None:
    artifact, folder = export(tmp_path, name, scheme, "qwen2")
    stored, read = numpy_of(folder), {"awq": read_awq, "gptq": read_gptq}[name]
    for linear in artifact.formats:
        codes, zero, scale = read(stored, linear)
        q = artifact.quantized(linear)
        assert np.array_equal(codes, q.codes.numpy())
        assert np.array_equal(zero, q.zero.numpy() if q.zero is not None else np.full(scale.shape, 8))
        group = codes.shape[1] // scale.shape[1]
        weight = (codes - zero.repeat(group, 1)) * scale.repeat(group, 1)
        assert torch.equal(torch.from_numpy(weight).float(), artifact.get(f"{linear}.weight"))
    assert load_file(folder / "model.safetensors")["model.layers.0.mlp.up_proj.scales"].dtype == torch.float16


@pytest.mark.parametrize("scheme", ["int4", "int4-channel", "int4-asym"])
def test_compressed_tensors_unpacks_its_own_format(tmp_path: Path, scheme: str) -> None:
    artifact, folder = export(tmp_path, "compressed_tensors", scheme)
    stored = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    group = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    for linear in artifact.formats:
        parts = {k.removeprefix(f"{linear}."): t for k, t in stored.items() if k.startswith(f"{linear}.weight")}
        parts["weight_scale"] = parts["weight_scale"].float()
        weight = PackedQuantizationCompressor.decompress(parts, group)["weight"]
        assert torch.equal(weight, artifact.get(f"{linear}.weight"))


FP8_PAIRS = [(name, scheme) for name, scheme in PAIRS if scheme in ("fp8-channel", "fp8-tensor") and name != "dense"]


@pytest.mark.parametrize(("name", "scheme"), FP8_PAIRS)
def test_fp8_weights_come_back(tmp_path: Path, name: str, scheme: str) -> None:
    artifact, folder = export(tmp_path, name, scheme)
    stored, scheme_name = load_file(folder / "model.safetensors"), scheme
    for linear in artifact.formats:
        weight, scale = stored[f"{linear}.weight"], stored[f"{linear}.weight_scale"]
        assert weight.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
        if (name, scheme_name) == ("modelopt", "fp8-channel"):
            assert scale.shape == weight.shape[:1]
            scale = scale[:, None]
        assert torch.equal(weight.float(), artifact.quantized(linear).codes.float())
        assert torch.equal(weight.float() * scale, artifact.get(f"{linear}.weight"))
        one = {"modelopt": (), "compressed_tensors": (1,)}[name]
        assert scale.shape == (one if scheme == "fp8-tensor" else (weight.shape[0], 1))
        if scheme == "fp8-tensor":
            assert stored[f"{linear}.input_scale"].shape == one
            assert stored[f"{linear}.input_scale"].item() == artifact.raw(f"{linear}.input_scale").item()


@pytest.mark.parametrize(("name", "scheme"), PAIRS)
def test_everything_else_is_as_it_was_and_bytes_repeat(tmp_path: Path, name: str, scheme: str) -> None:
    artifact, folder = export(tmp_path, name, scheme)
    stored = load_file(folder / "model.safetensors")
    for plain in set(artifact.names()) - {f"{linear}.weight" for linear in artifact.formats}:
        assert torch.equal(stored[plain].float(), artifact.raw(plain).float()), plain
    for leaf in ("tokenizer.json", "generation_config.json", "LICENSE", "chat_template.jinja"):
        assert (folder / leaf).read_bytes() == (artifact.path / leaf).read_bytes()
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "model-00001-of-00002.safetensors").write_text("left by an interrupted run")
    run(artifact.path, [name], ["vllm"], BIG, tmp_path / "out")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first
    for text in first.values():
        assert str(tmp_path).encode() not in text
    save_file(stored, tmp_path / "library.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "library.safetensors").read_bytes() == first["model.safetensors"]


def logits(state: dict[str, Tensor], folder: Path) -> Tensor:
    config = AutoConfig.from_pretrained(folder)
    config.__dict__.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.load_state_dict({name: value.float() for name, value in state.items()}, strict=True)
    with torch.no_grad():
        return model(torch.arange(4, 60)[None]).logits


def test_logits_of_all_int4_formats_are_identical(tmp_path: Path) -> None:
    artifact = make(tmp_path / "artifact", config_of("qwen2"), "int4", SOME_BIAS)
    done = run(artifact.path, ["awq", "gptq", "compressed_tensors", "dense"], ["vllm"], BIG, tmp_path / "out")
    found = []
    for name, read in (("awq", read_awq), ("gptq", read_gptq)):
        stored = numpy_of(done[name])
        state = {k: torch.from_numpy(v) for k, v in stored.items() if k.endswith((".weight", ".bias"))}
        for linear in artifact.formats:
            codes, zero, scale = read(stored, linear)
            group = codes.shape[1] // scale.shape[1]
            state[f"{linear}.weight"] = torch.from_numpy((codes - zero.repeat(group, 1)) * scale.repeat(group, 1))
        found.append(logits(state, done[name]))
    found.append(logits(load_file(done["dense"] / "model.safetensors"), done["dense"]))
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(done["compressed_tensors"], dtype=torch.float32)
        found.append(model(torch.arange(4, 60)[None]).logits)
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("scheme", ["fp8-channel", "fp8-tensor"])
def test_transformers_decompresses_fp8(tmp_path: Path, scheme: str) -> None:
    artifact, folder = export(tmp_path, "compressed_tensors", scheme)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model(torch.arange(4, 8)[None])  # decompresses
    for linear in artifact.formats:
        assert torch.equal(model.get_submodule(linear).weight, artifact.get(f"{linear}.weight"))


@pytest.mark.parametrize("name", ["dense", "compressed_tensors"])
def test_shards_and_index_load(tmp_path: Path, name: str) -> None:
    artifact = make(tmp_path / "artifact", config_of("llama"), "int4")
    whole = run(artifact.path, [name], ["vllm"], BIG, tmp_path / "whole")[name]
    parts = run(artifact.path, [name], ["vllm"], 30_000, tmp_path / "parts")[name]
    index = json.loads((parts / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    joined = {key: value for file in files for key, value in load_file(parts / file).items()}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in joined.values())
    one = load_file(whole / "model.safetensors")
    assert joined.keys() == one.keys() and all(torch.equal(joined[key], one[key]) for key in one)
    assert max((parts / file).stat().st_size for file in files) < 30_000 + 8_000
    AutoModelForCausalLM.from_pretrained(parts)


def test_dense_is_float16_where_that_is_exact(tmp_path: Path) -> None:
    for scheme, dtype in (("int4", torch.float16), ("int4-asym", torch.float32), ("fp8-channel", torch.float32)):
        artifact, folder = export(tmp_path / scheme, "dense", scheme)
        stored = load_file(folder / "model.safetensors")
        assert {stored[f"{linear}.weight"].dtype for linear in artifact.formats} == {dtype}
        model = AutoModelForCausalLM.from_pretrained(folder)
        for name in artifact.names():
            assert torch.equal(model.get_parameter(name).float(), artifact.get(name).float())


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_tied_models_have_no_head(tmp_path: Path, family: str) -> None:
    _, folder = export(tmp_path, "compressed_tensors", family=family, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True


def test_skipped_linears_are_listed_for_every_engine(tmp_path: Path) -> None:
    skip = ["model.layers.1.mlp.down_proj", "model.layers.0.self_attn.[qkv]_proj", "lm_head"]
    skip = [skip[0], *(f"model.layers.0.self_attn.{x}_proj" for x in "qkv"), skip[2]]
    for name, kind in (("awq", "int4"), ("gptq", "int4"), ("compressed_tensors", "int4"), ("modelopt", "fp8-tensor")):
        artifact, folder = export(tmp_path / name, name, SCHEMES[kind] | {"skip": skip})
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        listed = config.get("modules_to_not_convert") or config.get("ignore")
        if name == "gptq":
            listed = [rule[3:-1].replace("\\", "") for rule in config["dynamic"]] + ["lm_head"]
        assert sorted(listed) == sorted(skip)
        stored = load_file(folder / "model.safetensors")
        assert torch.equal(stored[f"{skip[0]}.weight"], artifact.raw(f"{skip[0]}.weight"))
    legacy = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    assert legacy["quant_algo"] == "FP8" and sorted(legacy["exclude_modules"]) == sorted(skip)


@pytest.mark.parametrize("scheme", [*SCHEMES, "mixed"])
def test_the_library_accepts_the_compressed_tensors_config(tmp_path: Path, scheme: str) -> None:
    coarse = {"model.layers.1.mlp.down_proj": {"dtype": "int4"}}
    chosen = SCHEMES["int4"] | {"overrides": coarse} if scheme == "mixed" else scheme
    artifact, folder = export(tmp_path, "compressed_tensors", chosen)
    raw = json.loads((folder / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(raw)
    assert config.ignore == ["lm_head"] and config.quantization_status == "compressed"
    group = config.config_groups["group_0"]
    assert group.targets == ["Linear"] or scheme == "mixed"
    assert (group.input_activations is None) == scheme.startswith(("int", "mixed"))
    if scheme == "mixed":
        assert config.config_groups["group_1"].targets == list(coarse)
        assert config.config_groups["group_1"].weights.strategy == "channel"
        assert sorted(group.targets + list(coarse)) == sorted(artifact.formats)


def refuse(
    tmp_path: Path, name: str, scheme: Any, *words: str, engines: tuple[str, ...] = ("vllm",), **options: Any
) -> None:
    artifact = make(tmp_path / "artifact", config_of("llama", **options), scheme)
    with pytest.raises(ValueError) as error:
        run(artifact.path, ["dense", name], engines, BIG, tmp_path / "out")
    assert all(word in str(error.value) for word in words), error.value
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path: Path) -> None:
    int4 = SCHEMES["int4"]
    refuse(
        tmp_path / "a", "gptq", "int4-asym", "model.layers.0.mlp.down_proj", "int4-g32-asym", "gptq", "export.formats"
    )
    mixed = int4 | {"overrides": {"*down_proj": {"dtype": "int4"}}}
    refuse(tmp_path / "b", "awq", mixed, "layers.0.mlp.down_proj is int4-channel", "size 32", "compressed_tensors")
    narrow = {"intermediate_size": 100, "hidden_size": 64}
    channel = {"weights": {"dtype": "int4"}}
    refuse(tmp_path / "c", "awq", channel, "gate_proj has 100 outputs", "multiples of 8", "scheme.skip", **narrow)
    refuse(tmp_path / "d", "compressed_tensors", channel, "down_proj has 100 inputs", "multiples of 8", **narrow)
    fp8 = SCHEMES["fp8-channel"]
    refuse(tmp_path / "e", "compressed_tensors", fp8, "vllm fp8-channel takes multiples of 16", **narrow)
    g16 = {"weights": {"dtype": "int4", "group_size": 16}}
    refuse(tmp_path / "f", "compressed_tensors", g16, "group size 16", "(32, 64, 128)", "[32]", "export.engines")
    one = int4 | {"skip": ["model.layers.0.self_attn.k_proj"]}
    refuse(tmp_path / "g", "awq", one, "k_proj is not quantized", "q_proj is int4-g32", "skip all")


def test_scales_off_the_grid_and_unshared_are_refused(tmp_path: Path) -> None:
    artifact = make(tmp_path / "artifact", config_of("llama"), "fp8-tensor")
    path = artifact.path / "block-00001.safetensors"
    stored = load_file(path)
    stored["model.layers.1.self_attn.v_proj.input_scale"] *= 2
    save_file(stored, path)
    with pytest.raises(ValueError, match=r"input_scale of model.layers.1.self_attn.q_proj is .*shared scale"):
        run(artifact.path, ["modelopt"], ["vllm"], BIG, tmp_path / "out")
    artifact = make(tmp_path / "int4", config_of("llama"), "int4")
    path = artifact.path / "block-00001.safetensors"
    stored = load_file(path)
    stored["model.layers.1.mlp.up_proj.scale"][0, 0] = 0.1
    save_file(stored, path)
    with pytest.raises(ValueError, match=r"up_proj.scale holds 0.100000001.*float16.*grid"):
        run(artifact.path, ["awq"], ["vllm"], BIG, tmp_path / "out")


def test_launch_files_name_what_is_served() -> None:
    config = {"dtype": "bfloat16", "max_position_embeddings": 64, "quantization_config": {"quant_method": "modelopt"}}
    files = {}
    for engine in plugins.names("export.engines"):
        files |= plugins.find("export.engines", engine).launch("demo-fp8", config)
    assert files.keys() == {
        "serve/vllm.sh", "serve/vllm_plugin.sh", "serve/trtllm.sh", "serve/trtllm.yaml", "serve/trtllm_legacy.sh",
        "serve/generate.py",
    }  # fmt: skip
    assert 'vllm serve . --served-model-name demo-fp8 --dtype bfloat16 "$@"' in files["serve/vllm.sh"]
    assert "8.9" in files["serve/vllm.sh"] and "trtllm-serve . " in files["serve/trtllm.sh"]
    compile(files["serve/generate.py"], "generate.py", "exec")


def test_who_loads_what() -> None:
    assert loads("vllm", "gptq", {"int4"}) and not loads("trtllm", "awq") and loads("trtllm", "modelopt")
    assert not loads("transformers", "compressed_tensors", {"int4-asym"}) and loads("trtllm", "dense", {"int4-asym"})


def test_bias_on_every_linear_of_every_block(tmp_path: Path) -> None:
    artifact = make(tmp_path / "artifact", config_of("llama"), "int4", ALL)
    folder = run(artifact.path, ["awq"], ["vllm"], BIG, tmp_path / "out")["awq"]
    stored = load_file(folder / "model.safetensors")
    for block, leaf in ((block, leaf) for block in range(2) for leaf in ALL):
        bias = stored[f"model.layers.{block}.{leaf}.bias"]
        assert bias.dtype == torch.bfloat16 and bool(bias.any()) == (block == 0)
