"""Directories for TensorRT-LLM: layout by a slow loop, and a reference loader that does to them what its loaders do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from export.stage import run
from gate.lint import check
from gate.readers import open_export
from qat.artifact import Artifact
from qat.coverage import loads
from tests.artifacts import ALL, SCHEMES, config_of, make

SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_key_value_heads": 2}
INT4 = {"weights": {"dtype": "int4", "group_size": 128}}
W4A8 = INT4 | {"inputs": {"dtype": "fp8_e4m3", "per": "tensor"}}
GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
KINDS: dict[str, dict[str, Any]] = {"int4": INT4, "w4a8": W4A8} | {
    kind: SCHEMES[kind] for kind in ("fp8-channel", "fp8-tensor", "fp8-block")
}
NAMES = {
    "int4": "W4A16_AWQ", "w4a8": "W4A8_AWQ", "fp8-channel": "FP8_PER_CHANNEL_PER_TOKEN", "fp8-tensor": "FP8",
    "fp8-block": "FP8_PB_WO",
}  # fmt: skip


def export(tmp_path: Path, kind: str, family: str = "llama", **more: Any) -> tuple[Artifact, Path]:
    sizes = SIZES if kind != "fp8-block" else SIZES | {"num_attention_heads": 4, "num_key_value_heads": 4}
    artifact = make(tmp_path / "artifact", config_of(family, **(sizes | more)), KINDS[kind], ALL)
    return artifact, run(artifact.path, ["modelopt"], ["trtllm"], 10**9, tmp_path / "out")["modelopt"]


@pytest.mark.parametrize("kind", KINDS)
def test_lint_and_reader_agree_with_the_artifact(tmp_path: Path, kind: str) -> None:
    artifact, folder = export(tmp_path, kind)
    assert loads("trtllm", "modelopt", {kind}) and check(folder, ["trtllm"], artifact) == []
    said = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    inline = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert said["quant_algo"] == inline["quant_algo"] == NAMES[kind] and inline["quant_method"] == "modelopt"
    assert (said.get("group_size"), inline.get("group_size")) == (
        (128, 128) if kind in ("int4", "w4a8") else (None, None)
    )
    read = open_export(folder)
    for name in artifact.formats:
        assert torch.equal(read.codes(name).float(), artifact.quantized(name).codes.float())
        assert torch.equal(read.get(f"{name}.weight"), artifact.get(f"{name}.weight"))


def test_nibbles_are_rows_in_two_s_complement(tmp_path: Path) -> None:
    artifact, folder = export(tmp_path, "int4")
    stored = load_file(folder / "model.safetensors")
    for name in list(artifact.formats)[:7]:
        codes, packed = artifact.quantized(name).codes.int() - 8, stored[f"{name}.weight"]
        assert packed.dtype == torch.uint8 and packed.shape == (codes.shape[0] // 2, codes.shape[1])
        for row in range(codes.shape[0]):
            nibble = packed[row // 2].int() >> (4 * (row % 2)) & 15
            assert torch.equal(torch.where(nibble > 7, nibble - 16, nibble), codes[row])
        scale = stored[f"{name}.weight_scale"]
        assert scale.dtype == torch.float32 and torch.equal(scale, scale.bfloat16().float())


class Loaded:
    """The fused linear that TensorRT-LLM makes of some stored ones, by the rules of its modules/linear.py."""

    def __init__(self, stored: dict[str, Tensor], names: list[str], algorithm: str, size: int | None) -> None:
        def all_of(part: str) -> list[Tensor]:
            return [stored[f"{name}.{part}"] for name in names]

        self.factor: Tensor | None = None
        if algorithm.startswith("W4A"):
            rows = [torch.stack([w & 15, w >> 4], 1).flatten(0, 1).int() for w in all_of("weight")]
            codes = torch.cat([torch.where(r > 7, r - 16, r) for r in rows]).float()
            scale = torch.cat(all_of("weight_scale")).bfloat16().float()  # cast to the model's dtype
            assert size is not None
            self.weight = codes * scale.repeat_interleave(size, 1)
            if len(names) == 1:
                self.factor = stored[f"{names[0]}.pre_quant_scale"]  # KeyError when it is not there
                assert self.factor.dtype == torch.bfloat16
            if algorithm == "W4A8_AWQ":
                for part in ("weight_scale_2", "input_scale"):
                    assert len({value.item() for value in all_of(part)}) == 1 and all_of(part)[0].shape == ()
                largest = max(stored_weight.abs().max() for stored_weight in self.weight.split(1))
                assert all_of("weight_scale_2")[0].item() * 448 == pytest.approx(largest.item(), rel=1e-6)
        elif algorithm == "FP8":
            own, one = all_of("weight_scale"), torch.stack(all_of("weight_scale")).max()
            wide = [(w.float() * s).bfloat16() for w, s in zip(all_of("weight"), own, strict=True)]
            codes = torch.cat([(w.float() / one).to(torch.float8_e4m3fn) for w in wide])
            self.weight = codes.float() * one
        elif algorithm == "FP8_PB_WO":
            scale = torch.cat([s.squeeze(3).squeeze(1) for s in all_of("weight_scale")])
            wide_scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            self.weight = torch.cat(all_of("weight")).float() * wide_scale
        else:
            scale = torch.empty(sum(len(w) for w in all_of("weight")))
            scale.copy_(torch.cat(all_of("weight_scale")))  # as it is, with no squeeze
            self.weight = torch.cat(all_of("weight")).float() * scale[:, None]
        self.bias = torch.cat([b.bfloat16().float() for b in all_of("bias")])

    def __call__(self, x: Tensor) -> Tensor:
        return (x if self.factor is None else x * self.factor.float()) @ self.weight.T + self.bias


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "qwen3"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_loader_computes_what_was_trained(tmp_path: Path, kind: str, family: str) -> None:
    artifact, folder = export(tmp_path, kind, family)
    stored = load_file(folder / "model.safetensors")
    x = torch.randn(5, 384, generator=torch.Generator().manual_seed(0))
    for block in range(2):
        for group in GROUPS:
            part = "mlp" if group[0] in ("gate_proj", "down_proj") else "self_attn"
            names = [f"model.layers.{block}.{part}.{leaf}" for leaf in group]
            loaded = Loaded(stored, names, NAMES[kind], 128 if kind in ("int4", "w4a8") else None)
            weight = torch.cat([artifact.get(f"{name}.weight") for name in names])
            biases = [artifact.optional(f"{name}.bias") for name in names]
            shapes = [artifact.get(f"{name}.weight").shape[0] for name in names]
            bias = torch.cat([torch.zeros(n) if b is None else b for b, n in zip(biases, shapes, strict=True)])
            assert torch.equal(loaded.weight, weight) and torch.equal(loaded.bias, bias)
            inputs = x[:, : weight.shape[1]]
            assert torch.equal(loaded(inputs), inputs @ weight.T + bias)


def test_what_tensorrt_llm_cannot_take_is_refused(tmp_path: Path) -> None:
    def refused(number: int, words: str, scheme: Any, family: str = "llama", **more: Any) -> None:
        artifact = make(tmp_path / f"{number}", config_of(family, **(SIZES | more)), scheme)
        with pytest.raises(ValueError, match=words):
            run(artifact.path, ["modelopt"], ["trtllm"], 10**9, tmp_path / "out")

    refused(0, r"group size 32; trtllm's int4 kernels take \(64, 128\)", {"weights": {"group_size": 32}})
    refused(1, "int4-channel; modelopt int4 has groups", {"weights": {"dtype": "int4"}})
    refused(2, r"k_proj has 32 outputs; trtllm int4 takes multiples of 64", INT4, head_dim=32, num_key_value_heads=1)
    refused(3, "not known how trtllm loads int4 of MixtralForCausalLM", INT4, "mixtral")
    refused(4, "int4-g128-asym, which modelopt cannot hold", {"weights": {"group_size": 128, "symmetric": False}})
