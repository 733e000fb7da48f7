"""A good directory has no faults; every planted one is found and named."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from export.stage import run
from gate import lint
from gate.readers import open_export
from qat import plugins
from qat.checkpoint import INDEX
from qat.coverage import loads
from tests.artifacts import SCHEMES, WIDE, config_of, make
from tests.planting import config, drop, first, put, quantization

ENGINES = ("vllm", "transformers")
Q0, K0, UP1 = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj", "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("awq", "int4-asym"),
        ("gptq", "int4"),
        ("gptq", "int4-channel"),
        ("compressed_tensors", "int4"),
        ("compressed_tensors", "int4-asym"),
        ("compressed_tensors", "fp8-channel"),
        ("compressed_tensors", "fp8-tensor"),
        ("modelopt", "fp8-tensor"),
        ("dense", "int4"),
    ],
)
def test_a_good_directory_has_no_faults(tiny: SimpleNamespace, form: str, kind: str, biases: bool) -> None:
    folder = tiny.export(form, kind, biases)
    assert lint.check(folder, ENGINES, tiny.artifact(kind, biases)) == []
    assert lint.check(folder, ENGINES) == []


TENSOR_FAULTS = {  # what is planted -> (format, scheme, change of the tensors, kind of the fault, where)
    "tensor missing": ("awq", "int4", drop("model.norm.weight"), "missing", "model.norm.weight"),
    "part missing": ("awq", "int4", drop(f"{UP1}.qzeros"), "missing", f"{UP1}.qzeros"),
    "head missing": ("gptq", "int4", drop("lm_head.weight"), "missing", "lm_head.weight"),
    "unknown tensor": ("awq", "int4", put(f"{UP1}.comp", torch.ones(2)), "unexpected", f"{UP1}.comp"),
    "another format's part": ("awq", "int4", put(f"{UP1}.g_idx", torch.ones(2)), "unexpected", f"{UP1}.g_idx"),
    "zero point though symmetric": (
        "compressed_tensors", "int4", put(f"{UP1}.weight_zero_point", torch.ones(16, 2, dtype=torch.int32)),
        "unexpected", f"{UP1}.weight_zero_point",
    ),
    "wrong shape": ("awq", "int4", put(f"{UP1}.scales", lambda s: s[:1]), "shape", f"{UP1}.scales"),
    "transposed": (
        "compressed_tensors", "int4", put(f"{UP1}.weight_scale", lambda s: s.T),
        "shape", f"{UP1}.weight_scale",
    ),
    "wrong dtype": ("gptq", "int4", put(f"{UP1}.scales", lambda s: s.float()), "dtype", f"{UP1}.scales"),
    "integer norm": (
        "awq", "int4", put("model.norm.weight", torch.ones(64, dtype=torch.int32)),
        "dtype", "model.norm.weight",
    ),
    "NaN scale": ("awq", "int4", put(f"{UP1}.scales", first(math.nan)), "finite", f"{UP1}.scales"),
    "zero scale": ("gptq", "int4", put(f"{UP1}.scales", first(0)), "scale", f"{UP1}.scales"),
    "negative scale": ("gptq", "int4", put(f"{UP1}.scales", first(-1)), "scale", f"{UP1}.scales"),
    "subnormal scale": ("awq", "int4", put(f"{UP1}.scales", first(2.0**-15)), "scale", f"{UP1}.scales"),
    "infinite input scale": (
        "modelopt", "fp8-tensor", put(f"{UP1}.input_scale", torch.tensor(math.inf)),
        "finite", f"{UP1}.input_scale",
    ),
    "scale that bfloat16 rounds": ("awq", "int4", put(f"{UP1}.scales", first(1 + 2**-10)), "rounded", f"{UP1}.scales"),
    "NaN in fp8 codes": (
        "modelopt", "fp8-tensor", put(f"{UP1}.weight", lambda w: first(0x7F)(w.view(torch.uint8)).view(w.dtype)),
        "finite", f"{UP1}.weight",
    ),
    "infinite bias": ("awq", "int4", put(f"{UP1}.bias", first(math.inf)), "finite", f"{UP1}.bias"),
    "zeros of version 2": (
        "gptq", "int4", put(f"{UP1}.qzeros", torch.full((2, 16), -2004318072, dtype=torch.int32)),
        "qzeros", f"{UP1}.qzeros",
    ),
    "one zero point": ("gptq", "int4", put(f"{UP1}.qzeros", first(0x77777776)), "qzeros", f"{UP1}.qzeros"),
    "activation order": ("gptq", "int4", put(f"{UP1}.g_idx", lambda g: g.flip(0)), "g_idx", f"{UP1}.g_idx"),
    "weight_shape": (
        "compressed_tensors", "int4", put(f"{UP1}.weight_shape", torch.tensor([64, 128])),
        "weight_shape", f"{UP1}.weight_shape",
    ),
    "weight scale not shared": (
        "compressed_tensors", "fp8-tensor", put(f"{K0}.weight_scale", lambda s: s * 2), "shared", f"{Q0}.weight_scale",
    ),
    "input scale not shared": (
        "modelopt", "fp8-tensor", put(f"{K0}.input_scale", lambda s: s * 2),
        "shared", f"{Q0}.input_scale",
    ),
    "no input scale": ("modelopt", "fp8-tensor", drop(f"{K0}.input_scale"), "missing", f"{K0}.input_scale"),
    "bias of one fused linear missing": ("awq", "int4", drop(f"{K0}.bias"), "bias_missing", f"{K0}.bias"),
    "bias of one row": ("awq", "int4", put(f"{K0}.bias", torch.zeros(1)), "shape", f"{K0}.bias"),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSOR_FAULTS)
def test_a_planted_tensor_is_found_without_the_artifact(tiny: SimpleNamespace, case: str) -> None:
    form, kind, change, fault, where = TENSOR_FAULTS[case]
    folder = tiny.export(form, kind)
    tiny.edit(folder, change)
    found = lint.check(folder, ENGINES)
    assert (fault, where) in {(f.kind, f.where) for f in found}, [str(f) for f in found]
    assert len(found) <= 3


CONFIG_FAULTS = {
    "group size of another model": ("awq", "int4", quantization(group_size=64), "shape", f"{Q0}.qzeros"),
    "group size that does not divide": ("gptq", "int4", quantization(group_size=48), "group_size", Q0),
    "wider model": ("awq", "int4", config(intermediate_size=96), "shape", f"{UP1}.qweight"),
    "flag off": ("awq", "int4", config(mlp_bias=False), "bias_dropped", f"{UP1}.bias"),
    "vLLM's own flag off": ("awq", "int4", config(qkv_bias=False), "bias_dropped", f"{Q0}.bias"),
    "no flag at all": (
        "compressed_tensors", "fp8-channel", lambda c: c.pop("attention_bias"),
        "bias_dropped", f"{Q0}.bias",
    ),
    "tied head stored": ("awq", "int4", config(tie_word_embeddings=True), "tied", "lm_head.weight"),
    "ignored though quantized": ("compressed_tensors", "int4", quantization(ignore=["lm_head", UP1]), "ignore", UP1),
    "head not ignored": ("compressed_tensors", "int4", quantization(ignore=[]), "ignore", "lm_head"),
    "substring": ("awq", "int4", quantization(modules_to_not_convert=["lm_head", "mlp.up"]), "ignore", UP1),
    "unknown method": ("awq", "int4", quantization(quant_method="hqq"), "config", None),
    "architecture without slots": (
        "awq", "int4", config(model_type="qwen2", architectures=["Qwen2ForCausalLM"]), "bias_dropped", f"{UP1}.bias",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIG_FAULTS)
def test_a_planted_config_is_found(tiny: SimpleNamespace, case: str) -> None:
    form, kind, change, fault, where = CONFIG_FAULTS[case]
    folder = tiny.export(form, kind)
    tiny.edit_json(folder / "config.json", change)
    found = lint.check(folder, ENGINES)
    assert (fault, where or str(folder)) in {(f.kind, f.where) for f in found}, [str(f) for f in found]


def test_flags_on_without_biases_are_found(tiny: SimpleNamespace) -> None:
    folder = tiny.export("awq", "int4", biases=False)
    tiny.edit_json(folder / "config.json", config(mlp_bias=True))
    found = lint.check(folder, ["vllm"])
    assert {f.kind for f in found} == {"bias_missing"}
    assert len(found) == 2 * 3


def test_a_linear_skipped_apart_from_its_fused_siblings_is_found(tiny: SimpleNamespace) -> None:
    folder, artifact = tiny.export("compressed_tensors", "int4"), tiny.artifact("int4")

    def unquantize(t: dict[str, Tensor]) -> None:
        for part in ("weight_packed", "weight_scale", "weight_shape"):
            del t[f"{K0}.{part}"]
        t[f"{K0}.weight"] = artifact.get(f"{K0}.weight").half()

    tiny.edit(folder, unquantize)
    tiny.edit_json(folder / "config.json", quantization(ignore=["lm_head", K0]))
    assert [(f.kind, f.where) for f in lint.check(folder, ENGINES)] == [("fused", K0)]


SOURCE_FAULTS = {
    "scales times 1.05": ("awq", "int4", put(f"{UP1}.scales", lambda s: (s * 1.05).bfloat16().half()), f"{UP1}.weight"),
    "one code": (
        "gptq", "int4", put(f"{UP1}.qweight", lambda w: w ^ torch.eye(*w.shape, dtype=w.dtype)),
        f"{UP1}.weight",
    ),
    "one zero point": (
        "awq", "int4-asym", put(f"{UP1}.qzeros", lambda z: z ^ torch.eye(*z.shape, dtype=z.dtype)),
        f"{UP1}.weight",
    ),
    "bias": ("compressed_tensors", "int4", put(f"{UP1}.bias", first(0.5)), f"{UP1}.bias"),
    "norm": ("dense", "int4", put("model.norm.weight", first(0.5)), "model.norm.weight"),
    "input scale": (
        "modelopt", "fp8-tensor", put("model.layers.0.mlp.down_proj.input_scale", torch.tensor(0.5)),
        "model.layers.0.mlp.down_proj.input_scale",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SOURCE_FAULTS)
def test_what_differs_from_its_source_is_found(tiny: SimpleNamespace, case: str) -> None:
    form, kind, change, where = SOURCE_FAULTS[case]
    folder = tiny.export(form, kind)
    tiny.edit(folder, change)
    assert lint.check(folder, ENGINES) == []  # nothing is wrong with it as a foreign checkpoint
    (fault,) = lint.check(folder, ENGINES, tiny.artifact(kind))
    assert (fault.kind, fault.where) == ("source", where)
    assert "in the source" in str(fault)


def test_a_bias_that_the_source_lacks_may_only_be_zeros(tiny: SimpleNamespace) -> None:
    folder = tiny.export("awq", "int4")
    bare = tiny.artifact("int4", biases=False)
    assert {f.kind for f in lint.check(folder, ENGINES, bare)} == {"source"}
    tiny.edit(folder, lambda t: [t[n].zero_() for n in t if n.endswith(".bias")])
    assert lint.check(folder, ENGINES, bare) == []


def shard(folder: Path) -> dict[str, str]:
    """Split the one file in two, with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {f"model-0000{i}-of-00002.safetensors": sorted(tensors)[i - 1 :: 2] for i in (1, 2)}
    place = {}
    for file, names in files.items():
        save_file({n: tensors[n] for n in names}, folder / file)
        place |= dict.fromkeys(names, file)
    (folder / INDEX).write_text('{"weight_map": {}}')
    return place


def test_index_and_shards_are_held_against_each_other(tiny: SimpleNamespace) -> None:
    folder = tiny.export("awq", "int4")
    place = shard(folder)

    def faults(weight_map: dict[str, str]) -> list[tuple[str, str]]:
        tiny.edit_json(folder / INDEX, lambda index: index.update(weight_map=weight_map))
        return [(f.kind, f.where) for f in lint.check(folder, ENGINES)]

    assert faults(place) == []
    assert faults({**place, "model.extra": "model-00001-of-00002.safetensors"}) == [("index", "model.extra")]
    other = {**place, "model.norm.weight": "model-00009-of-00002.safetensors"}
    assert faults(other) == [("index", "model.norm.weight")]
    assert faults({n: f for n, f in place.items() if n != "model.norm.weight"}) == [("index", "model.norm.weight")]
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model-00003-of-00002.safetensors")
    assert {kind for kind, _ in faults(place)} == {"shard"}
    (folder / "model-00003-of-00002.safetensors").unlink()
    (folder / INDEX).unlink()
    assert [f.kind for f in lint.check(folder, ENGINES)] == ["index"]


def test_a_shard_that_is_not_whole_is_found(tiny: SimpleNamespace) -> None:
    folder = tiny.export("awq", "int4")
    whole = (folder / "model.safetensors").read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    for content in (
        whole[:-1],
        whole + b"\0",
        whole[:50],
        b"",
        pointer,
        whole.replace(b'"dtype":"F16"', b'"dtype":"F32"'),
    ):
        (folder / "model.safetensors").write_bytes(content)
        (fault,) = lint.check(folder, ENGINES)
        assert fault.kind == "shard"
    (folder / "model.safetensors").unlink()
    assert [f.kind for f in lint.check(folder, ENGINES)] == ["shard"]
    (folder / "config.json").unlink()
    assert [f.kind for f in lint.check(folder, ENGINES)] == ["config"]


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_our_own_writers_write_has_no_faults(tmp_path: Path, family: str, scheme: str) -> None:
    kind = scheme.replace("int4-channel", "int4")
    forms = [name for name in plugins.names("export.formats") if loads("vllm", name, {kind})]
    artifact = make(
        tmp_path / "artifact",
        config_of(family, tie_word_embeddings=family == "qwen2", **(WIDE if scheme == "fp8-block" else {})),
        scheme,
        frozenset({"self_attn.o_proj", "mlp.up_proj"}),
    )
    for form, folder in run(artifact.path, forms, ENGINES, 50_000, tmp_path / "out").items():
        assert lint.check(folder, ENGINES, artifact) == [], form
        assert open_export(folder).format == form


def test_an_unknown_engine_is_an_error(tiny: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match=r"there is no export/engines/sglang\.py \(known: transformers, trtllm"):
        lint.check(tiny.export("awq", "int4"), ["sglang"])


def test_a_fault_reads_as_thing_value_rule_and_way_out(tiny: SimpleNamespace) -> None:
    folder = tiny.export("awq", "int4")
    tiny.edit(folder, put(f"{UP1}.bias", lambda b: b))
    tiny.edit_json(folder / "config.json", config(mlp_bias=False))
    lines = list(lint.report(lint.check(folder, ["vllm"]), at_most=1))
    assert lines == [
        "model.layers.0..1.mlp.gate_proj.bias: stored; no flag of the config declares it: vllm drops it silently; "
        "set mlp_bias: true (2 layers)",
        "... and 2 more",
    ]
