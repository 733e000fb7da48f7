"""int8, w8a8, fp8 blocks, KV-cache scales: what the gate computes, against Hugging Face's forward, and finds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from export.stage import run
from gate import lint
from gate.readers import Export, open_export
from gate.stage import State, artifact_state, plain_state
from gate.stage._content import fingerprint
from qat.artifact import Artifact
from tests.artifacts import KV_CACHE, SCHEMES, WIDE, config_of, make

IDS = torch.randint(128, (2, 20), generator=torch.Generator().manual_seed(1))
K0 = "model.layers.0.self_attn.k_proj"


def exported(tmp_path: Path, form: str, kind: str, cache: bool = False, **overrides: Any) -> tuple[Artifact, Path]:
    scheme = SCHEMES[kind] | overrides | ({"kv_cache": KV_CACHE} if cache else {})
    artifact = make(tmp_path / "artifact", config_of("llama", **(WIDE if kind == "fp8-block" else {})), scheme)
    return artifact, run(artifact.path, [form], ["vllm"], 10**9, tmp_path / "out")[form]


def rounded(x: Tensor, kind: str) -> Tensor:
    """The tokens of x (..., K) as an engine rounds them, one at a time."""
    out = x.clone().view(-1, x.shape[-1])
    for token in out:
        for part in token.split(128) if kind == "fp8-block" else [token]:
            if kind == "w8a8":
                scale = part.abs().max() / 127
                part.copy_((part / scale).round() * scale)
            else:
                scale = part.abs().max() / 448
                part.copy_((part / scale).to(torch.float8_e4m3fn).float() * scale)
    return out.view(x.shape)


class RoundedCache(DynamicCache):
    def __init__(self, export: Export) -> None:
        super().__init__()
        self.export = export

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        scales = [self.export.raw(name).item() for name in self.export.cache_names(layer)]
        stored = super().update(keys, values, layer, *args, **kwargs)
        back = [
            (x / s).clamp(-448, 448).to(torch.float8_e4m3fn).float() * s for x, s in zip(stored, scales, strict=True)
        ]
        return back[0], back[1]


@torch.no_grad()
def reference(export: Export, artifact: Artifact, kind: str, cache: bool) -> Tensor:
    """Logits of Hugging Face's whole model with the artifact's weights, inputs and cache rounded by the loops above."""
    model = AutoModelForCausalLM.from_config(export.config, dtype=torch.float32).eval()
    model.load_state_dict({name: artifact.get(name).float() for name in artifact.names()})
    if artifact.scheme.inputs is not None:
        for name in artifact.formats:
            model.get_submodule(name).register_forward_pre_hook(lambda m, args: (rounded(args[0], kind),))
    found: Tensor = model(IDS, cache=RoundedCache(export) if cache else None).logits
    return found


@torch.no_grad()
def logits(state: State) -> Tensor:
    model = state.model("cpu", torch.float32)
    hidden = torch.cat(list(model.hidden(IDS)))
    with model.ends():
        return model.logits(hidden)


CASES = [
    ("compressed_tensors", "w8a8", False),
    ("compressed_tensors", "fp8-block", False),
    ("modelopt", "fp8-block", True),
    ("compressed_tensors", "int8", True),
    ("compressed_tensors", "w8a8", True),
]


@pytest.mark.parametrize(("form", "kind", "cache"), CASES)
def test_the_gate_computes_what_the_engine_would(tmp_path: Path, form: str, kind: str, cache: bool) -> None:
    artifact, folder = exported(tmp_path, form, kind, cache)
    export, expected = open_export(folder), None
    expected = reference(export, artifact, kind, cache)
    for state in (plain_state("x", folder), artifact_state("y", artifact, export.config)):
        assert torch.allclose(logits(state), expected, atol=2e-4), state.name
    plain = State("z", "", export.config, artifact, folder, "")
    assert not torch.allclose(logits(plain), expected, atol=2e-3)


def test_the_fingerprint_knows_inputs_and_cache(tmp_path: Path) -> None:
    artifact, folder = exported(tmp_path, "compressed_tensors", "w8a8", True)
    state = plain_state("x", folder)
    assert state.input_quant is not None and state.cache_scales is not None
    full = fingerprint(state.config, artifact, state.input_quant, state.cache_scales)
    other = fingerprint(state.config, artifact, lambda name: "token", state.cache_scales)
    changed = fingerprint(state.config, artifact, state.input_quant, lambda i: (torch.ones(1), torch.ones(1)))
    assert len({full, other, changed, fingerprint(state.config, artifact, state.input_quant)}) == 4
    mine = artifact_state("y", artifact, state.config)
    assert fingerprint(state.config, artifact, mine.input_quant, mine.cache_scales) == full


def edit(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


CACHE0 = "model.layers.0.self_attn.k_scale"
FAULTS = {  # what is planted -> (form, kind, cache, change, kind of the fault, where)
    "no cache scale": ("compressed_tensors", "int4", True, lambda t: t.pop(CACHE0), "missing", CACHE0),
    "cache scale of zero": (
        "compressed_tensors", "int4", True, lambda t: t.update({CACHE0: torch.zeros(1)}), "scale", CACHE0),
    "cache scale in bfloat16": (
        "compressed_tensors", "int4", True, lambda t: t.update({CACHE0: torch.ones(1).bfloat16()}), "source", CACHE0),
    "another cache scale": (
        "modelopt", "fp8-tensor", True, lambda t: t[f"{K0}.k_scale"].mul_(2), "source", f"{K0}.k_scale"),
    "cache scale that is not declared": (
        "compressed_tensors", "int4", False, lambda t: t.update({CACHE0: torch.ones(1)}), "unexpected", CACHE0),
    "blocks in two dimensions": (
        "modelopt", "fp8-block", False, lambda t: t.update({f"{K0}.weight_scale": torch.ones(1, 2)}), "shape",
        f"{K0}.weight_scale"),
    "a block too few": (
        "compressed_tensors", "fp8-block", False, lambda t: t.update({f"{K0}.weight_scale": torch.ones(1, 1)}), "shape",
        f"{K0}.weight_scale"),
    "int8 codes as uint8": (
        "compressed_tensors", "w8a8", False, lambda t: t.update({f"{K0}.weight": t[f"{K0}.weight"].view(torch.uint8)}),
        "dtype", f"{K0}.weight"),
    "subnormal scale of w8a8": (
        "compressed_tensors", "w8a8", False, lambda t: t[f"{K0}.weight_scale"].fill_(1e-40), "scale",
        f"{K0}.weight_scale"),
    "int8 zero point": (
        "gptq", "int8", False, lambda t: t[f"{K0}.qzeros"].fill_(0x7F7F7F80), "qzeros", f"{K0}.qzeros"),
    "one code": (
        "gptq", "int8", False, lambda t: t[f"{K0}.qweight"].view(-1)[:1].add_(1), "source", f"{K0}.weight"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_lint_finds_what_is_planted(tmp_path: Path, name: str) -> None:
    form, kind, cache, change, fault, where = FAULTS[name]
    artifact, folder = exported(tmp_path, form, kind, cache)
    assert lint.check(folder, ["vllm"], artifact) == []
    edit(folder, change)
    found = lint.check(folder, ["vllm"], artifact)
    assert (fault, where) in {(f.kind, f.where) for f in found}, found


def test_a_config_that_forgets_the_cache_differs_from_its_source(tmp_path: Path) -> None:
    artifact, folder = exported(tmp_path, "compressed_tensors", "int4", True)
    edit_config(folder, lambda q: q.update(kv_cache_scheme=None))
    edit(folder, lambda t: [t.pop(name) for name in list(t) if name.endswith(("k_scale", "v_scale"))])
    (fault,) = lint.check(folder, ["vllm"], artifact)
    assert "does not declare KV-cache scales" in str(fault)


@pytest.mark.parametrize("form", ["gptq", "compressed_tensors"])
def test_fused_linears_of_two_formats_are_found(tmp_path: Path, form: str) -> None:
    _, folder = exported(tmp_path, form, "int4", overrides={f"*.{x}_proj": {"dtype": "int8"} for x in "qkv"})
    assert lint.check(folder, ["vllm"]) == []

    def only_q(q: dict[str, Any]) -> None:
        if form == "gptq":
            q["dynamic"] = {pattern: how for pattern, how in q["dynamic"].items() if "q_proj" in pattern}
        else:
            for group in q["config_groups"].values():
                eight = group["weights"]["num_bits"] == 8
                group["targets"] = [n for n in group["targets"] if n.endswith("q_proj")] if eight else ["Linear"]

    edit_config(folder, only_q)
    faults = [f for f in lint.check(folder, ["vllm"]) if f.kind == "fused"]
    assert len(faults) == 2 and "one format for all" in str(faults[0])


def change(key: str, inner: str, value: object) -> Callable[[dict[str, Any]], Any]:
    return lambda q: q["config_groups"]["group_0"][key].update({inner: value})


@pytest.mark.parametrize(
    ("form", "kind", "cache", "edit_it", "says"),
    [
        ("compressed_tensors", "w8a8", False, lambda q: q.update(format="pack-quantized"), "as 'pack-quantized'"),
        ("compressed_tensors", "w8a8", False, change("input_activations", "type", "float"), "beside weights"),
        ("compressed_tensors", "w8a8", False, change("input_activations", "strategy", "tensor"), "beside weights"),
        ("compressed_tensors", "fp8-block", False, change("weights", "block_structure", [64, 64]), r"of \[64, 64"),
        ("compressed_tensors", "fp8-block", False, change("input_activations", "group_size", 64), "in groups of 64"),
        ("compressed_tensors", "int4", True, lambda q: q["kv_cache_scheme"].update(type="int"), "kv_cache_scheme with"),
        ("modelopt", "fp8-tensor", True, lambda q: q.update(kv_cache_scheme=None), "the KV cache is"),
        ("modelopt", "fp8-block", False, lambda q: q.update(quant_algo="FP8"), "the same in every file"),
        ("gptq", "int8", False, lambda q: q.update(dynamic={"+:.*": {"bits": 3}}), "4 or 8 bits"),
    ],
)  # fmt: skip
def test_a_directory_that_is_not_understood_is_an_error(
    tmp_path: Path, form: str, kind: str, cache: bool, edit_it: Callable[[dict[str, Any]], Any], says: str
) -> None:
    _, folder = exported(tmp_path, form, kind, cache)
    edit_config(folder, edit_it)
    with pytest.raises(ValueError, match=says):
        open_export(folder)
