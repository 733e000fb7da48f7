"""Directories written by slow loops come back as what was written."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM

from gate._inputs import quantize_input
from gate.readers import open_export
from qat.model import Model

CASES = [
    ("awq", "int4"),
    ("awq", "int4-asym"),
    ("awq", "int4-channel"),
    ("gptq", "int4"),
    ("gptq", "int4-channel"),
    ("compressed_tensors", "int4"),
    ("compressed_tensors", "int4-asym"),
    ("compressed_tensors", "int4-channel"),
    ("compressed_tensors", "fp8-channel"),
    ("compressed_tensors", "fp8-tensor"),
    ("modelopt", "fp8-tensor"),
    ("dense", "int4"),
]


@pytest.mark.parametrize(("form", "kind"), CASES)
def test_an_export_reads_back_as_its_artifact(tiny: SimpleNamespace, form: str, kind: str) -> None:
    artifact, export = tiny.artifact(kind), open_export(tiny.export(form, kind))
    assert export.format == form
    assert export.names() == artifact.names()
    for name in export.names():
        assert torch.equal(export.get(name).float(), artifact.get(name).float()), name
    assert set(export.linears) == (set() if form == "dense" else set(artifact.formats))
    for name in export.linears:
        q = artifact.quantized(name)
        assert torch.equal(export.codes(name).float(), q.codes.float())
        assert torch.equal(export.scale(name), q.scale)
        zero = export.zero(name)
        assert zero is None or torch.equal(zero, torch.full_like(zero, 8) if q.zero is None else q.zero)


def test_the_model_of_an_export_computes_what_hugging_face_computes(tiny: SimpleNamespace) -> None:
    folder = tiny.export("compressed_tensors", "int4-asym")
    export, artifact = open_export(folder), tiny.artifact("int4-asym")
    model = LlamaForCausalLM(AutoConfig.from_pretrained(tiny.export("dense", "int4"))).eval().float()
    model.load_state_dict({name: artifact.get(name).float() for name in artifact.names()})
    ours = Model(export.config, export)
    hidden = torch.cat(list(ours.hidden(tiny.windows)))
    with torch.no_grad(), ours.ends():
        assert torch.allclose(ours.logits(hidden), model(tiny.windows).logits, atol=2e-4)


def test_sizes_are_those_of_the_file(tiny: SimpleNamespace) -> None:
    export = open_export(tiny.export("awq", "int4"))
    # by hand, per block: q 64 + k 32 + v 32 + o 64 rows of 64 inputs; gate 128, up 128 rows of 64; down 64 rows of 128
    weights = 2 * ((64 + 32 + 32 + 64 + 128 + 128) * 64 + 64 * 128)
    biases = 2 * (64 + 32 + 32 + 64 + 128 + 128 + 64)
    assert export.bits_per_weight == pytest.approx(4 + (16 + 4) / 32 + 16 * biases / weights)
    plain = 2 * 96 * 64 + 5 * 64  # embedding, head, five norms
    stored = export.bits_per_weight * weights + 16 * plain
    assert export.bits_per_parameter == pytest.approx(stored / (weights + biases + plain))
    assert export.size_on_disk == (tiny.export("awq", "int4") / "model.safetensors").stat().st_size
    assert open_export(tiny.parent).bits_per_weight == 16


def test_how_inputs_are_quantized_is_read_from_the_directory(tiny: SimpleNamespace) -> None:
    name = "model.layers.0.self_attn.q_proj"
    assert open_export(tiny.export("compressed_tensors", "int4")).input_quant(name) is None
    assert open_export(tiny.export("compressed_tensors", "fp8-channel")).input_quant(name) == "token"
    for form in ("compressed_tensors", "modelopt"):
        export = open_export(tiny.export(form, "fp8-tensor"))
        assert export.input_quant(name) == tiny.artifact("fp8-tensor").raw(f"{name}.input_scale")
        assert export.input_quant("lm_head") is None


def test_quantized_inputs_are_the_nearest_fp8_values() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    grid = codes[codes.isfinite()].double()
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(3)) * 10
    for row, back in zip(x, quantize_input(x, "token"), strict=True):
        scale = float(row.abs().max()) / 448
        nearest = (row.double()[:, None] / scale - grid).abs().min(-1).values
        assert torch.allclose((back.double() - row.double()).abs() / scale, nearest, atol=1e-4)
    static = torch.tensor(0.01)
    assert quantize_input(torch.tensor([100.0, -100.0]), static).tolist() == pytest.approx([4.48, -4.48])
    assert torch.equal(quantize_input(x, None), x)
    assert torch.equal(quantize_input(torch.zeros(2, 4), "token"), torch.zeros(2, 4))


def test_activation_order_of_a_foreign_gptq_file_is_obeyed(tiny: SimpleNamespace) -> None:
    folder, name = tiny.export("gptq", "int4"), "model.layers.1.mlp.up_proj"
    before = open_export(folder)
    codes, scale = before.codes(name).float(), before.scale(name)
    order = torch.arange(64) % 2
    tiny.edit(folder, lambda t: t.update({f"{name}.g_idx": order.to(torch.int32)}))
    expected = torch.stack([(codes[:, k] - 8) * scale[:, order[k]] for k in range(64)], 1)
    assert torch.equal(open_export(folder).get(f"{name}.weight"), expected)


def test_version_2_zero_points_are_stored_as_they_are(tiny: SimpleNamespace) -> None:
    folder, name = tiny.export("gptq", "int4"), "model.layers.1.mlp.up_proj"
    eights = tiny.slow_pack(torch.full((2, 128), 8), list(range(8)))
    tiny.edit_json(folder / "config.json", lambda c: c["quantization_config"].update(checkpoint_format="gptq_v2"))
    tiny.edit(folder, lambda t: t.update({f"{name}.qzeros": eights}))
    assert torch.equal(open_export(folder).zero(name), torch.full((128, 2), 8, dtype=torch.uint8))


def set_quantization(**values: object):  # type: ignore[no-untyped-def]
    return lambda config: config["quantization_config"].update(values)


@pytest.mark.parametrize(
    ("form", "kind", "change", "says"),
    [
        ("awq", "int4", set_quantization(quant_method="hqq"), "'hqq' is not one that the gate reads"),
        ("awq", "int4", set_quantization(bits=8), "bits 8"),
        ("awq", "int4", set_quantization(zero_point=False), "zero_point False"),
        ("gptq", "int4", set_quantization(sym=False), "sym False"),
        ("gptq", "int4", set_quantization(checkpoint_format="marlin"), "'marlin'"),
        ("compressed_tensors", "int4", set_quantization(format="marlin-24"), "marlin-24"),
        ("compressed_tensors", "int4", set_quantization(config_groups={}), "without config_groups"),
        ("modelopt", "fp8-tensor", set_quantization(quant_algo="NVFP4"), "NVFP4"),
        ("modelopt", "fp8-tensor", set_quantization(ignore=["lm_head", "layers.1.mlp.up"]), "disagree"),
    ],
)
def test_a_directory_that_is_not_understood_is_an_error(tiny: SimpleNamespace, form, kind, change, says) -> None:  # type: ignore[no-untyped-def]
    folder = tiny.export(form, kind)
    tiny.edit_json(folder / "config.json", change)
    with pytest.raises(ValueError, match=says):
        open_export(folder)


def test_two_formats_in_one_directory_are_an_error(tiny: SimpleNamespace) -> None:
    folder = tiny.export("awq", "int4")
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(ValueError, match="one directory holds one format"):
        open_export(folder)


def test_targets_go_from_exact_name_to_class_name(tiny: SimpleNamespace) -> None:
    folder, name = tiny.export("compressed_tensors", "int4"), "model.layers.0.mlp.down_proj"

    def add_group(config):  # type: ignore[no-untyped-def]
        groups = config["quantization_config"]["config_groups"]
        other = {**groups["group_0"]["weights"], "group_size": 64}
        groups["group_1"] = {"targets": [f"re:.*{name[5:]}$"], "weights": other, "input_activations": None}

    tiny.edit_json(folder / "config.json", add_group)
    export = open_export(folder)
    assert (export.group_size(name), export.group_size("model.layers.1.mlp.down_proj")) == (64, 32)
