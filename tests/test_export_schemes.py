"""int8, w8a8, fp8 blocks, KV-cache scales and mixed precision in every format that holds them.

Read back by compressed-tensors and transformers, and by slow loops written from the formats' documentation.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.quant_scheme import QuantizationScheme
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from export.stage import loaders, run
from gate.lint import check
from gate.readers import open_export
from qat.artifact import Artifact
from qat.scheme import Scheme
from tests.artifacts import KV_CACHE, SCHEMES, WIDE, config_of, make

BIG = 10**9
RAGGED = {"hidden_size": 160, "intermediate_size": 272, "head_dim": 40}  # no whole blocks of 128
ATTENTION8 = {f"*.{x}_proj": {"dtype": "int8"} for x in "qkv"} | {"*.down_proj": {"dtype": "int8", "group_size": 32}}
MIXED = {"weights": {"group_size": 32}, "overrides": ATTENTION8}


def export(
    tmp_path: Path, name: str, scheme: Any, engines: tuple[str, ...] = ("vllm",), **options: Any
) -> tuple[Artifact, Path]:
    artifact = make(tmp_path / "artifact", config_of("llama", **options), scheme, frozenset({"mlp.up_proj"}))
    return artifact, run(artifact.path, [name], engines, BIG, tmp_path / "out")[name]


def quantization(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


def same_as_artifact(artifact: Artifact, folder: Path, engines: tuple[str, ...]) -> None:
    """The gate's reader gives back every code and weight, and its lint finds nothing."""
    read = open_export(folder)
    assert set(read.linears) == set(artifact.formats)
    for name in read.linears:
        assert torch.equal(read.codes(name).float(), artifact.quantized(name).codes.float()), name
        assert torch.equal(read.get(f"{name}.weight"), artifact.get(f"{name}.weight")), name
    assert read.names() == sorted(set(artifact.names()) | {n for n in read.names() if n.endswith(".bias")})
    assert check(folder, engines, artifact) == []


CASES = [
    ("compressed_tensors", "int8", {}),
    ("compressed_tensors", {"weights": {"dtype": "int8"}}, {}),
    ("compressed_tensors", "w8a8", {}),
    ("compressed_tensors", "fp8-block", WIDE),
    ("compressed_tensors", MIXED, {}),
    ("gptq", "int8", {}),
    ("gptq", {"weights": {"dtype": "int8"}}, {}),
    ("gptq", MIXED, {}),
    ("modelopt", "fp8-block", WIDE),
]


@pytest.mark.parametrize(("name", "scheme", "sizes"), CASES)
def test_the_gate_reads_back_what_was_written(tmp_path: Path, name: str, scheme: Any, sizes: dict[str, int]) -> None:
    artifact, folder = export(tmp_path, name, scheme, **sizes)
    same_as_artifact(artifact, folder, ("vllm",))


def test_ragged_blocks_are_written_where_no_engine_forbids_them(tmp_path: Path) -> None:
    artifact, folder = export(tmp_path, "compressed_tensors", "fp8-block", ("transformers",), **RAGGED)
    assert artifact.raw("model.layers.0.mlp.down_proj.scale").shape == (2, 3)
    same_as_artifact(artifact, folder, ("transformers",))


@pytest.mark.parametrize("scheme", ["int8", "w8a8", "fp8-block", "mixed"])
def test_compressed_tensors_decompresses_its_own_format(tmp_path: Path, scheme: str) -> None:
    chosen, sizes = (MIXED if scheme == "mixed" else scheme), (RAGGED if scheme == "fp8-block" else {})
    artifact, folder = export(tmp_path, "compressed_tensors", chosen, ("transformers",), **sizes)
    stored, config = load_file(folder / "model.safetensors"), quantization(folder)
    QuantizationConfig.model_validate(config)
    groups = {
        name: QuantizationScheme.model_validate(g) for g in config["config_groups"].values() for name in g["targets"]
    }
    for linear in artifact.formats:
        how = groups.get(linear) or groups["Linear"]
        parts = {k.removeprefix(f"{linear}."): t for k, t in stored.items() if k.startswith(f"{linear}.weight")}
        parts["weight_scale"] = parts["weight_scale"].float()
        library = BaseCompressor.get_value_from_registry(config["format"])
        assert torch.equal(library.decompress(parts, how)["weight"], artifact.get(f"{linear}.weight"))
        weight = {"weight": artifact.get(f"{linear}.weight"), "weight_scale": parts["weight_scale"]}
        again = library.compress(weight, how)
        for part, value in parts.items():
            assert torch.equal(again[part].float(), value.float()), (linear, part)


def read_gptq(stored: dict[str, Tensor], name: str, bits: int) -> tuple[Tensor, Tensor]:
    """(codes less the zero point, scale of each input) of one linear, one word at a time."""
    words, zeros, per_word, mask = stored[f"{name}.qweight"], stored[f"{name}.qzeros"], 32 // bits, 2**bits - 1
    codes = torch.zeros(words.shape[1], words.shape[0] * per_word)
    zero = torch.zeros(words.shape[1], zeros.shape[0])
    for i in range(per_word):
        codes[:, i::per_word] = ((words >> (bits * i)) & mask).T.float()
        zero[i::per_word] = (((zeros >> (bits * i)) & mask) + 1).T.float()
    group = stored[f"{name}.g_idx"].long()
    return codes - zero[:, group], stored[f"{name}.scales"].T.float()[:, group]


@pytest.mark.parametrize("scheme", ["int8", "mixed"])
def test_gptq_words_hold_the_codes_and_the_config_says_how_many_bits(tmp_path: Path, scheme: str) -> None:
    artifact, folder = export(tmp_path, "gptq", MIXED if scheme == "mixed" else scheme)
    stored, config = load_file(folder / "model.safetensors"), quantization(folder)
    for name, fmt in artifact.formats.items():
        rules = [options for pattern, options in config.get("dynamic", {}).items() if re.match(pattern[2:], name)]
        said = {key: config[key] for key in ("bits", "group_size")} | (rules[0] if rules else {})
        assert said == {"bits": fmt.bits, "group_size": fmt.group_size or -1}
        codes, scale = read_gptq(stored, name, fmt.bits)
        assert torch.equal(codes * scale, artifact.get(f"{name}.weight"))
    if scheme == "mixed":  # vLLM looks for the fused name
        found = [p for p in config["dynamic"] if re.match(p[2:], "model.layers.1.self_attn.qkv_proj")]
        assert len(found) == 3 and not any(
            re.match(p[2:], "model.layers.1.mlp.gate_up_proj") for p in config["dynamic"]
        )
        assert not any(re.match(p[2:], "model.layers.11.self_attn.qkv_proj") for p in config["dynamic"])


def test_modelopt_blocks_have_four_dimensions(tmp_path: Path) -> None:
    artifact, folder = export(tmp_path, "modelopt", "fp8-block", ("vllm", "trtllm"), **WIDE)
    stored = load_file(folder / "model.safetensors")
    said = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    assert said["quant_algo"] == quantization(folder)["quant_algo"] == "FP8_PB_WO"
    for name in artifact.formats:
        weight, scale = stored[f"{name}.weight"], stored[f"{name}.weight_scale"]
        rows, columns = weight.shape
        assert scale.shape == (rows // 128, 1, columns // 128, 1) and f"{name}.input_scale" not in stored
        blocks = weight.float().view(rows // 128, 128, columns // 128, 128) * scale
        assert torch.equal(blocks.view(rows, columns), artifact.get(f"{name}.weight"))


IDS = torch.arange(4, 60)[None]


@pytest.mark.parametrize("scheme", ["int8", "mixed", "fp8-block", "w8a8"])
def test_transformers_loads_it(tmp_path: Path, scheme: str) -> None:
    sizes = WIDE if scheme == "fp8-block" else {}
    chosen = MIXED if scheme == "mixed" else scheme
    artifact, folder = export(tmp_path, "compressed_tensors", chosen, ("transformers",), **sizes)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model(IDS)  # decompresses
    for linear in artifact.formats:
        assert torch.equal(model.get_submodule(linear).weight, artifact.get(f"{linear}.weight")), linear


CACHE_CASES = [
    ("compressed_tensors", "int4", {}),
    ("compressed_tensors", "w8a8", {}),
    ("compressed_tensors", "fp8-tensor", {}),
    ("modelopt", "fp8-tensor", {}),
    ("modelopt", "fp8-block", WIDE),
]


@pytest.mark.parametrize(("name", "kind", "sizes"), CACHE_CASES)
def test_cache_scales_are_where_the_engine_looks(tmp_path: Path, name: str, kind: str, sizes: dict[str, int]) -> None:
    artifact, folder = export(tmp_path, name, SCHEMES[kind] | {"kv_cache": KV_CACHE}, **sizes)
    same_as_artifact(artifact, folder, ("vllm",))
    stored, config, read = load_file(folder / "model.safetensors"), quantization(folder), open_export(folder)
    for block in range(2):
        attention = f"model.layers.{block}.self_attn"
        for i, part in enumerate(("k", "v")):
            place = f"{attention}.{part}_proj.{part}_scale" if name == "modelopt" else f"{attention}.{part}_scale"
            scale = artifact.raw(f"{attention}.{part}_scale")
            assert stored[place].dtype == torch.float32 and stored[place].shape == (() if name == "modelopt" else (1,))
            assert stored[place].item() == scale.item()
            assert torch.equal((read.cache_scales(block) or ())[i], scale)
    assert not [key for key in stored if key.endswith("_scale") and ".attn." in key]
    if name == "modelopt":
        legacy = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
        assert legacy["kv_cache_quant_algo"] == "FP8"
        assert config["kv_cache_scheme"] == {"type": "float", "num_bits": 8, "dynamic": False}
    else:
        scheme = QuantizationConfig.model_validate(config).kv_cache_scheme
        assert (scheme.num_bits, scheme.type, scheme.strategy, scheme.dynamic) == (8, "float", "tensor", False)


def test_without_cache_scales_none_are_declared(tmp_path: Path) -> None:
    for name in ("compressed_tensors", "modelopt"):
        _, folder = export(tmp_path / name, name, "fp8-tensor")
        assert quantization(folder)["kv_cache_scheme"] is None and open_export(folder).cache_scales(0) is None
    legacy = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    assert legacy["kv_cache_quant_algo"] is None


def refuse(tmp_path: Path, name: str, scheme: Any, *words: str, engines: Any = ("vllm",), **options: Any) -> None:
    artifact = make(tmp_path / "artifact", config_of("llama", **options), scheme)
    with pytest.raises(ValueError) as error:
        run(artifact.path, [name], engines, BIG, tmp_path / "out")
    assert all(word in str(error.value) for word in words), error.value
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    refuse(tmp_path / "a", "awq", "int8", "int8-g32", "awq cannot hold", "int4, int4-asym")
    refuse(tmp_path / "b", "gptq", "w8a8", "int8-channel, which gptq cannot hold")
    for i, name in enumerate(("awq", "gptq", "dense")):
        cached = SCHEMES["int4"] | {"kv_cache": KV_CACHE}
        refuse(tmp_path / f"c{i}", name, cached, f"{name} has no place for KV-cache scales", "compressed_tensors")
    refuse(tmp_path / "d", "compressed_tensors", "fp8-block", "vllm fp8-block takes multiples of 128", **RAGGED)
    refuse(
        tmp_path / "e",
        "modelopt",
        "fp8-block",
        "modelopt fp8-block takes multiples of 128",
        engines=("transformers",),
        **RAGGED,
    )
    split = {"weights": {"group_size": 32}, "overrides": {"*.k_proj": {"dtype": "int8", "group_size": 32}}}
    refuse(tmp_path / "f", "compressed_tensors", split, "k_proj is int8-g32", "q_proj is int4-g32", "as one linear")
    narrow = {"hidden_size": 64, "intermediate_size": 98}
    odd = {"weights": {"dtype": "int8"}}
    refuse(
        tmp_path / "g",
        "compressed_tensors",
        odd,
        "98 inputs",
        "int8 takes multiples of 4",
        engines=("transformers",),
        **narrow,
    )


def test_who_loads_which_cache_and_kind() -> None:
    every = ["vllm", "trtllm", "transformers"]
    plain = {kind: Scheme.model_validate(scheme) for kind, scheme in SCHEMES.items()}
    cached = {kind: Scheme.model_validate(scheme | {"kv_cache": KV_CACHE}) for kind, scheme in SCHEMES.items()}
    assert loaders(every, "modelopt", plain["fp8-tensor"]) == ["vllm", "trtllm"]
    assert loaders(every, "modelopt", cached["fp8-tensor"]) == ["vllm"]  # TensorRT-LLM runs an fp8 cache at scale 1
    assert loaders(every, "compressed_tensors", plain["fp8-block"]) == every
    assert loaders(every, "compressed_tensors", cached["int4"]) == ["vllm"]
    assert loaders(every, "compressed_tensors", plain["w8a8"]) == ["vllm", "transformers"]
    assert loaders(every, "gptq", plain["int8"]) == ["vllm"]
