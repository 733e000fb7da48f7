"""Lint for an engine and a number of ranks: every planted fault is found, and directories of other tools are good."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

from gate import lint
from gate.readers import _headers, open_export
from qat.cli import app
from tests.foreign import DIRECTORIES, LINEARS, SIZES, big
from tests.planting import Change, config, drop, first, put, quantization

QKV0 = LINEARS[:3]
Q0, K0, O0, UP1, DOWN1 = LINEARS[0], LINEARS[1], LINEARS[3], LINEARS[12], LINEARS[13]


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("foreign")

    def make(name: str) -> Path:
        folder = root / name.replace(" ", "-")
        return folder if folder.exists() else DIRECTORIES[name][0](folder)

    return make


@pytest.mark.parametrize("name", DIRECTORIES)
def test_directories_of_other_tools_are_good(foreign: Callable[[str], Path], name: str) -> None:
    for engine in DIRECTORIES[name][1]:
        assert [str(fault) for fault in lint.check(foreign(name), [engine])] == []
        assert [str(fault) for fault in lint.check(foreign(name), [engine], tp=2)] == []


def weights(**values: object) -> Change:
    return lambda c: c["quantization_config"]["config_groups"]["group_0"]["weights"].update(values)


def fp8_head(tensors: dict[str, Any]) -> None:
    """As Model-Optimizer stores a linear in FP8."""
    head = tensors["lm_head.weight"].float()
    scale = head.abs().max() / 448
    tensors |= {"lm_head.weight": (head / scale).to(torch.float8_e4m3fn), "lm_head.weight_scale": scale}
    tensors["lm_head.input_scale"] = torch.tensor(0.02)


NONE: Change = lambda _: None  # noqa: E731
HF = "hf_quant_config.json"
ONES = torch.ones(256, dtype=torch.bfloat16)
FAULTS: dict[str, tuple[str, str, Change, Change, str, str]] = {
    # planted -> (directory, engine, change of the tensors, change of config.json, kind, where)
    "awq for trtllm": ("AutoAWQ", "trtllm", NONE, NONE, "engine", "config.json"),
    "int4 of llm-compressor for trtllm": (
        "llm-compressor W4A16", "trtllm", NONE, NONE, "engine", "config.json group_0"),
    "fp8 rows of compressed-tensors for trtllm": (
        "llm-compressor FP8_DYNAMIC", "trtllm", NONE, NONE, "engine", "config.json group_0"),
    "int8 inputs for trtllm": ("llm-compressor W8A8", "trtllm", NONE, NONE, "engine", "config.json group_0"),
    "int4 of modelopt for vllm": ("ModelOpt W4A16", "vllm", NONE, NONE, "engine", HF),
    "dynamic activation order": (
        "llm-compressor W4A16", "vllm", NONE, weights(actorder="group"), "actorder", "config.json group_0"),
    "activation order of whole rows": (
        "llm-compressor W8A16", "vllm", NONE, weights(actorder="static"), "actorder", "config.json group_0"),
    "group indices": (
        "llm-compressor W4A16", "vllm", put(f"{UP1}.weight_g_idx", torch.arange(256, dtype=torch.int32)), NONE,
        "unexpected", f"{UP1}.weight_g_idx"),
    "sparsity": (
        "llm-compressor W4A16", "vllm", NONE, quantization(sparsity_config={"format": "dense"}),
        "engine", "config.json"),
    "an int8 cache": (
        "llm-compressor W4A16", "vllm", NONE,
        quantization(kv_cache_scheme={"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False,
                                      "symmetric": True}), "config", ""),
    "cache scales missing": (
        "llm-compressor W4A16", "vllm", NONE,
        quantization(kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False,
                                      "symmetric": True}), "missing", "model.layers.0.self_attn.k_scale"),
    "a cache scale that awq has no place for": (
        "AutoAWQ", "vllm", put("model.layers.0.self_attn.k_scale", torch.ones(1)), NONE,
        "unexpected", "model.layers.0.self_attn.k_scale"),
    "a zero cache scale": (
        "ModelOpt FP8 with cache", "vllm", put(f"{K0}.k_scale", torch.tensor(0.0)), NONE, "scale", f"{K0}.k_scale"),
    "a cache scale of 1.5": (
        "ModelOpt FP8 with cache", "trtllm", put(f"{K0}.k_scale", torch.tensor(1.5)), NONE,
        "kv_cache", f"{K0}.k_scale"),
    "no pre_quant_scale on o": (
        "ModelOpt W4A16", "trtllm", drop(f"{O0}.pre_quant_scale"), NONE, "pre_quant_scale", O0),
    "pre_quant_scale on q": (
        "ModelOpt W4A16", "trtllm", put(f"{Q0}.pre_quant_scale", ONES), NONE, "pre_quant_scale", Q0),
    "pre_quant_scale in another dtype": (
        "ModelOpt W4A8", "trtllm", put(f"{O0}.pre_quant_scale", lambda s: s.float()), NONE, "pre_quant_scale", O0),
    "pre_quant_scale of zero": (
        "ModelOpt W4A16", "trtllm", put(f"{O0}.pre_quant_scale", first(0)), NONE, "scale", f"{O0}.pre_quant_scale"),
    "weight_scale_2 not shared": (
        "ModelOpt W4A8", "trtllm", put(f"{K0}.weight_scale_2", torch.tensor(0.5)), NONE,
        "shared", f"{Q0}.weight_scale_2"),
    "weight_scale_2 missing": (
        "ModelOpt W4A8", "trtllm", drop(f"{K0}.weight_scale_2"), NONE, "missing", f"{K0}.weight_scale_2"),
    "pre_quant_scale not shared": (
        "ModelOpt W4A8", "trtllm", lambda t: t.update({f"{n}.pre_quant_scale": ONES * (1 + (n == K0)) for n in QKV0}),
        NONE, "shared", f"{Q0}.pre_quant_scale"),
    "pre_quant_scale on k alone": (
        "ModelOpt W4A8", "trtllm", put(f"{K0}.pre_quant_scale", ONES), NONE, "pre_quant_scale", Q0),
    "a model of float32": ("ModelOpt FP8", "trtllm", NONE, config(dtype="float32"), "dtype", "config.json"),
    "a quantized head": ("ModelOpt FP8", "trtllm", fp8_head, quantization(ignore=[]), "head", "lm_head"),
    "input scale not shared": (
        "ModelOpt W4A8", "trtllm", put(f"{K0}.input_scale", torch.tensor(0.5)), NONE, "shared", f"{Q0}.input_scale"),
    "interleaved words": (
        "ModelOpt W4A16", "trtllm", put(f"{UP1}.weight", lambda w: w.view(-1, w.shape[1] // 2)), NONE,
        "shape", f"{UP1}.weight"),
    "signed bytes": (
        "ModelOpt W4A16", "trtllm", put(f"{UP1}.weight", lambda w: w.view(torch.int8)), NONE, "dtype", f"{UP1}.weight"),
    "scales of rows in two dimensions": (
        "ModelOpt FP8 rows", "trtllm", put(f"{UP1}.weight_scale", lambda s: s[:, None]), NONE,
        "shape", f"{UP1}.weight_scale"),
    "scales of blocks in two dimensions": (
        "ModelOpt FP8 blocks", "trtllm", put(f"{UP1}.weight_scale", lambda s: s[:, 0, :, 0]), NONE,
        "shape", f"{UP1}.weight_scale"),
    "a quantizer left behind": (
        "ModelOpt FP8", "trtllm", put(f"{UP1}.input_quantizer._amax", torch.ones(())), NONE,
        "unexpected", f"{UP1}.input_quantizer._amax"),
    "another algorithm in config.json": (
        "ModelOpt FP8", "vllm", NONE, quantization(quant_algo="FP8_PB_WO"), "config", ""),
    "a bias without its flag": (
        "ModelOpt FP8", "trtllm", put(f"{UP1}.bias", torch.ones(512, dtype=torch.bfloat16)), NONE,
        "bias_dropped", f"{UP1}.bias"),
    "a flag without its biases": ("AutoAWQ", "vllm", NONE, config(mlp_bias=True), "bias_missing", f"{DOWN1}.bias"),
    "zero points of 8 bits where 4 belong": (
        "llm-compressor W4A16-asym", "vllm", put(f"{UP1}.weight_zero_point", lambda z: z.repeat(2, 1)), NONE,
        "shape", f"{UP1}.weight_zero_point"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_a_planted_fault_is_found(foreign: Callable[[str], Path], tiny: SimpleNamespace, case: str) -> None:
    name, engine, change, change_config, kind, where = FAULTS[case]
    folder = tiny.folder / "planted"
    shutil.copytree(foreign(name), folder)
    tiny.edit(folder, change)
    tiny.edit_json(folder / "config.json", change_config)
    if case == "a quantized head":
        tiny.edit_json(folder / HF, lambda c: c["quantization"].update(exclude_modules=[]))
    found = lint.check(folder, [engine])
    assert (kind, where or str(folder)) in {(f.kind, f.where) for f in found}, [str(f) for f in found]
    assert len({f.kind for f in found}) == 1


def test_a_stage_before_export_is_no_checkpoint(foreign: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(foreign("AutoAWQ"), tmp_path / "run/calibrate-0123")
    (folder / "artifact.json").write_text("{}")
    (fault,) = lint.check(folder, ["vllm"])
    assert (fault.kind, fault.what) == ("config", "a stage before export, in Tare's own layout")
    with pytest.raises(ValueError, match="calibrate-0123 is a stage before export"):
        open_export(folder)
    shutil.copytree(foreign("AutoAWQ"), tmp_path / "run/export-0123/awq")
    (fault,) = lint.check(tmp_path / "run", ["vllm"])
    assert fault.way_out == f"checkpoints lie below: give one of {tmp_path / 'run/export-0123/awq'}"


def test_an_engine_of_which_the_biases_are_not_known_is_a_fault(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen3Config(**sizes, num_key_value_heads=2, head_dim=32, vocab_size=96)
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    assert lint.check(tmp_path, ["trtllm", "vllm"]) == []
    (fault,) = lint.check(tmp_path, ["trtllm_legacy", "vllm"])
    assert fault.kind == "engine" and fault.what == "Qwen3ForCausalLM for trtllm_legacy"
    assert "transformers, trtllm, vllm" in fault.rule


def test_what_stands_in_hf_quant_config_is_read(foreign: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(foreign("ModelOpt W4A16"), tmp_path / "planted")
    original = json.loads((folder / HF).read_text())
    for change, words in (
        ({"group_size": None}, "W4A16_AWQ with group_size None"),
        ({"group_size": 64}, "in groups of 64"),
        ({"quant_algo": "W4A16_GPTQ"}, "the gate reads FP8, "),
        ({"exclude_modules": ["lm_head", "*q_proj"]}, "disagree on whether"),
        ({"kv_cache_quant_algo": "INT8"}, "FP8 or nothing is read"),
        ({"has_zero_point": True}, "W4A16_AWQ with has_zero_point true"),
    ):
        (folder / HF).write_text(json.dumps({"quantization": original["quantization"] | change}))
        found = lint.check(folder, ["trtllm"])
        assert found and words in str(found[0]), [str(f) for f in found]
    (folder / HF).unlink()
    assert "has no hf_quant_config.json" in str(lint.check(folder, ["trtllm"])[0])


RANKS = [  # (directory, engine, ranks, kind, where, what)
    ("AutoAWQ", "vllm", 4, "kernel", O0, "64 inputs on each of 4 ranks"),
    ("llm-compressor W4A16", "vllm", 8, "tp", "config.json", "4 heads on 8 ranks"),
    ("llm-compressor FP8_BLOCK", "vllm", 4, "kernel", Q0, "64 outputs on each of 4 ranks"),
    ("ModelOpt W4A16", "trtllm", 4, "kernel", O0, "64 inputs on each of 4 ranks"),
    ("ModelOpt FP8", "trtllm", 3, "tp", Q0, "256 outputs on 3 ranks"),
]


@pytest.mark.parametrize(("name", "engine", "tp", "kind", "where", "what"), RANKS)
def test_ranks_that_split_a_group_are_found(
    foreign: Callable[[str], Path], name: str, engine: str, tp: int, kind: str, where: str, what: str
) -> None:
    assert (kind, where, what) in {(f.kind, f.where, f.what) for f in lint.check(foreign(name), [engine], tp=tp)}


def test_one_fault_in_one_gptq_directory(tiny: SimpleNamespace) -> None:
    folder = tiny.export("gptq", "int4")
    tiny.edit_json(folder / "config.json", quantization(desc_act=True))
    assert [(f.kind, f.where) for f in lint.check(folder, ["vllm"])] == [("actorder", "config.json")]
    tiny.edit_json(folder / "config.json", quantization(desc_act=False, group_size=16))
    assert {f.kind for f in lint.check(folder, ["vllm"])} == {"shape"}


def test_modelopt_int4_is_read_as_it_was_rounded(foreign: Callable[[str], Path]) -> None:
    read = open_export(foreign("ModelOpt W4A16"))
    torch.manual_seed(0)
    weight = dict(LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16().named_parameters())[f"{O0}.weight"].float()
    groups = weight.view(256, -1, 128)
    step = groups.abs().amax(-1, keepdim=True) / 7
    expected = (torch.round(groups / step) * step).view(256, 256) * torch.linspace(0.5, 2, 256).bfloat16().float()
    assert torch.allclose(read.get(f"{O0}.weight"), expected, rtol=1e-6, atol=0)


def test_headers_alone_are_read_of_a_large_directory(tmp_path: Path) -> None:
    folder = big(tmp_path / "70b", layers=80, shards=30)
    _headers._read.cache_clear()
    start = time.perf_counter()
    assert lint.check(folder, ["vllm"], tp=8, values=False) == []
    assert time.perf_counter() - start < 5
    assert _headers._read.cache_info().misses == 30  # each header is read once
    split = lint.check(folder, ["vllm"], tp=64, values=False)
    assert ("kernel", "448 inputs on each of 64 ranks") in {(f.kind, f.what) for f in split}  # no multiple of 128
    (line,) = (line for line in lint.report(split) if "448 inputs" in line)
    assert line.startswith("model.layers.0..79.mlp.down_proj: ") and line.endswith(" (80 layers)")
    assert [f.kind for f in lint.check(folder, ["trtllm"], values=False)] == ["engine"]


def test_the_command(foreign: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TARE_LOG", "TARE_PROGRESS"):  # the command sets them; this brings them back
        monkeypatch.setenv(name, "")

    def said(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["lint", *words])
        return result.exit_code, result.output

    code, text = said(str(foreign("AutoAWQ")), "--engine", "vllm", "--tp", "2")
    assert code == 0 and "headers are good for vllm, 2 ranks" in text and "so are the values" in text
    code, text = said(str(foreign("AutoAWQ")), "--engine", "trtllm", "--headers")
    assert code == 1 and "trtllm raises NotImplementedError" in text
    code, text = said(str(foreign("AutoAWQ")), "--engine", "vlm")
    assert code == 2 and "did you mean 'vllm'" in text
    code, text = said(str(foreign("AutoAWQ")), "--engine", "vllm", "--quiet")
    assert (code, text) == (0, "")
    code, text = said(str(foreign("AutoAWQ")), "--engine", "trtllm", "--json")
    (line,) = map(json.loads, text.splitlines())
    assert code == 1 and line["event"] == "fault" and line["way_out"] == "export modelopt for it"
