"""A tiny model, artifacts of it, and writers of every format: slow loops that share nothing with export/."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from qat.artifact import Artifact, block_file, block_tensors, save_tensors, write_meta
from qat.checkpoint import SafetensorsFolder
from qat.quant import Quantized, max_scale, minmax_scale, quantize, to_grid
from qat.scheme import Scheme, TensorFormat
from tests.threads import one_thread

GROUP = 32
TOKEN = {"dtype": "fp8_e4m3", "per": "token", "dynamic": True}
STATIC = {"dtype": "fp8_e4m3", "per": "tensor"}
SCHEMES = {
    "int4": {"weights": {"dtype": "int4", "group_size": GROUP}},
    "int4-asym": {"weights": {"dtype": "int4", "group_size": GROUP, "symmetric": False}},
    "int4-channel": {"weights": {"dtype": "int4", "per": "channel"}},
    "fp8-channel": {"weights": {"dtype": "fp8_e4m3", "per": "channel"}, "inputs": TOKEN},
    "fp8-tensor": {"weights": {"dtype": "fp8_e4m3", "per": "tensor"}, "inputs": STATIC},
}
GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
LINEARS = {leaf: ("mlp" if leaf in GROUPS[2] + GROUPS[3] else "self_attn") for group in GROUPS for leaf in group}


def make_parent(folder: Path, tied: bool = False) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=96, max_position_embeddings=64, initializer_range=0.2, tie_word_embeddings=tied, dtype="bfloat16",
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def sample(parent: Path) -> Tensor:
    """Five windows of 24 tokens that the parent itself thinks likely."""
    model = LlamaForCausalLM.from_pretrained(parent).float().eval()
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(96, (5, 1), generator=generator)
    with torch.no_grad():
        while ids.shape[1] < 24:
            ids = torch.cat([ids, torch.multinomial(model(ids).logits[:, -1].softmax(-1), 1, generator=generator)], 1)
    return ids


def make_artifact(path: Path, parent: Path, kind: str, biases: bool = True) -> Artifact:
    """An artifact with max range, nearest codes and, with `biases`, random ones on every linear."""
    path.mkdir()
    generator = torch.Generator().manual_seed(1)
    source, scheme = SafetensorsFolder(parent), Scheme.model_validate(SCHEMES[kind])
    fmt, formats = scheme.weights, {}
    for index in range(2):
        out: dict[str, Tensor] = {}
        for group in GROUPS:
            names = [f"model.layers.{index}.{LINEARS[leaf]}.{leaf}" for leaf in group]
            largest = torch.stack([source.get(f"{n}.weight").float().abs().max() for n in names]).max()
            for name in names:
                weight = source.get(f"{name}.weight").float()
                q = quantize_max(weight, fmt, largest)
                bias = to_grid(torch.randn(len(weight), generator=generator) * 0.1) if biases else None
                static = torch.tensor([0.01 + 0.001 * len(group)]) if kind == "fp8-tensor" else None
                out |= block_tensors(name, q, static, bias)
                formats[name] = fmt
        for name in source.names():
            if name.startswith(f"model.layers.{index}.") and name.removesuffix(".weight") not in formats:
                out[name] = source.get(name)
        save_tensors(out, path / block_file(index))
    rest = {n: source.get(n) for n in source.names() if not n.startswith("model.layers.")}
    save_tensors(rest, path / "rest.safetensors")
    write_meta(path, scheme, formats, {})
    return Artifact(path)


def quantize_max(weight: Tensor, fmt: TensorFormat, largest: Tensor) -> Quantized:
    if fmt.per == "tensor":
        scale = max_scale(largest.view(1, 1), fmt)
        return Quantized(quantize(weight, scale, None, fmt), scale)
    groups = weight.view(len(weight), -1, fmt.group_of(weight.shape[1]))
    if fmt.symmetric:
        scale = max_scale(groups.abs().amax(-1), fmt)
        return Quantized(quantize(weight, scale, None, fmt), scale)
    scale, zero = minmax_scale(groups.amin(-1), groups.amax(-1))
    return Quantized(quantize(weight, scale, zero, fmt), scale, zero)


def slow_pack(values: Tensor, order: list[int]) -> Tensor:
    """(R, C) 0..15 -> int32 (R, C / 8), nibble i of word j is column 8 j + order[i]: one value at a time."""
    words = torch.zeros(len(values), values.shape[1] // 8, dtype=torch.int64)
    for j in range(words.shape[1]):
        for i, place in enumerate(order):
            words[:, j] += values[:, 8 * j + place].long() * 16**i
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


PLAIN, AWQ = [0, 1, 2, 3, 4, 5, 6, 7], [0, 2, 4, 6, 1, 3, 5, 7]


def awq_parts(name: str, q: Quantized, static: Tensor | None) -> dict[str, Tensor]:
    zero = torch.full(q.scale.shape, 8) if q.zero is None else q.zero
    return {
        f"{name}.qweight": slow_pack(q.codes.T, AWQ),
        f"{name}.qzeros": slow_pack(zero.T, AWQ),
        f"{name}.scales": q.scale.T.half(),
    }


def gptq_parts(name: str, q: Quantized, static: Tensor | None) -> dict[str, Tensor]:
    rows, columns = q.codes.shape
    return {
        f"{name}.qweight": slow_pack(q.codes, PLAIN).T,
        f"{name}.qzeros": torch.full((q.scale.shape[1], rows // 8), 0x77777777, dtype=torch.int32),
        f"{name}.scales": q.scale.T.half(),
        f"{name}.g_idx": torch.arange(columns, dtype=torch.int32) // (columns // q.scale.shape[1]),
    }


def compressed_parts(name: str, q: Quantized, static: Tensor | None) -> dict[str, Tensor]:
    if q.codes.dtype == torch.float8_e4m3fn:
        out = {f"{name}.weight": q.codes, f"{name}.weight_scale": q.scale if len(q.scale) > 1 else q.scale.view(1)}
        return out if static is None else {**out, f"{name}.input_scale": static}
    out = {
        f"{name}.weight_packed": pack_to_int32((q.codes.int() - 8).to(torch.int8), 4),
        f"{name}.weight_scale": q.scale.bfloat16(),
        f"{name}.weight_shape": torch.tensor(q.codes.shape),
    }
    if q.zero is not None:
        out[f"{name}.weight_zero_point"] = pack_to_int32((q.zero.int() - 8).to(torch.int8), 4, packed_dim=0)
    return out


def modelopt_parts(name: str, q: Quantized, static: Tensor | None) -> dict[str, Tensor]:
    assert static is not None
    return {f"{name}.weight": q.codes, f"{name}.weight_scale": q.scale.view(()), f"{name}.input_scale": static.view(())}


PARTS = {"awq": awq_parts, "gptq": gptq_parts, "compressed_tensors": compressed_parts, "modelopt": modelopt_parts}


def quantization_config(form: str, kind: str) -> dict[str, Any]:
    group = -1 if kind == "int4-channel" else GROUP
    if form == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    if form == "gptq":
        return {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": True, "desc_act": False,
                "checkpoint_format": "gptq"}  # fmt: skip
    if form == "modelopt":
        return {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    weights: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP,
                               "symmetric": kind != "int4-asym"}  # fmt: skip
    inputs = None
    if kind == "int4-channel":
        weights |= {"strategy": "channel", "group_size": None}
    if kind.startswith("fp8"):
        weights = {"num_bits": 8, "type": "float", "strategy": kind.removeprefix("fp8-"), "symmetric": True}
        is_static = kind == "fp8-tensor"
        inputs = {"num_bits": 8, "type": "float", "strategy": "tensor" if is_static else "token",
                  "symmetric": True, "dynamic": not is_static}  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if inputs else "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
    }


def write(folder: Path, parent: Path, artifact: Artifact, form: str, kind: str) -> Path:
    """Export an artifact by the loops above."""
    folder.mkdir()
    tensors, has_bias = {}, False
    for name in artifact.names():
        owner = name.removesuffix(".weight")
        if owner in artifact.formats and owner != name and form != "dense":
            tensors |= PARTS[form](owner, artifact.quantized(owner), artifact.optional(f"{owner}.input_scale"))
        else:
            value = artifact.get(name)
            tensors[name] = value.bfloat16() if name.endswith(".bias") else value
            has_bias |= name.endswith(".bias")
    config = json.loads((parent / "config.json").read_text())
    config |= {"attention_bias": has_bias, "mlp_bias": has_bias}
    if form != "dense":
        config["quantization_config"] = quantization_config(form, kind)
    if form == "modelopt":
        hf = {"producer": {"name": "test"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
        (folder / "hf_quant_config.json").write_text(json.dumps(hf))
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


def edit(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change the tensors of a one-file directory in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")


def edit_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


class Made:
    """Parent, artifacts and exports, each made once."""

    def __init__(self, root: Path) -> None:
        self.root, self.parent = root, make_parent(root / "parent")
        self.windows = sample(self.parent)
        self._artifacts: dict[tuple[str, bool], Artifact] = {}

    def artifact(self, kind: str, biases: bool = True) -> Artifact:
        if (kind, biases) not in self._artifacts:
            path = self.root / f"artifact-{kind}-{biases}"
            self._artifacts[kind, biases] = make_artifact(path, self.parent, kind, biases)
        return self._artifacts[kind, biases]

    def export(self, form: str, kind: str, biases: bool = True) -> Path:
        folder = self.root / f"{form}-{kind}-{biases}"
        return folder if folder.exists() else write(folder, self.parent, self.artifact(kind, biases), form, kind)


@pytest.fixture(scope="package", autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="package")
def made(on_one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def tiny(made: Made, tmp_path: Path) -> SimpleNamespace:
    """parent, export(form, kind) -> folders of this test alone. artifact(kind): shared, not to be changed."""

    def copy(source: Path) -> Path:
        return (
            tmp_path / source.name
            if (tmp_path / source.name).exists()
            else shutil.copytree(source, tmp_path / source.name)
        )

    return SimpleNamespace(
        parent=copy(made.parent),
        artifact=made.artifact,
        export=lambda *args, **more: copy(made.export(*args, **more)),
        windows=made.windows,
        folder=tmp_path,
        edit=edit,
        edit_json=edit_json,
        slow_pack=slow_pack,
    )
