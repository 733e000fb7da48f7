"""Numbers that calibration meets: refused where nothing can come of them, exact where zeros are meant."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from gate.readers import open_export
from tests.known_bad.case import UP, Case, Note, Place, Spoil, both, check, given, put, tensors

EMBED, NORM = "model.embed_tokens.weight", "model.norm.weight"
POST = "model.layers.1.post_attention_layernorm.weight"
OTHER = "fetch them again, or choose another revision"
GPTQ = ("train=null", "calibrate.round=gptq")
AWQ = ("train=null", "calibrate.transform=awq")


def exported(place: Place) -> Any:
    return open_export(place.stage("export") / "compressed_tensors")


def zeros(name: str, where: Callable[[Tensor], Tensor]) -> Callable[[Place], str]:
    """Zeros come back as zeros, and every scale is a normal number."""

    def good(place: Place) -> str:
        export = exported(place)
        weight, scale = export.get(name), export.scale(name.removesuffix(".weight"))
        assert (where(weight) == 0).all() and torch.isfinite(weight).all() and (scale >= 2**-14).all()
        return "released; exact zeros, with scales of at least 2^-14"

    return good


def finite(place: Place) -> str:
    export = exported(place)
    assert all(torch.isfinite(export.get(name)).all() for name in export.names())
    row = json.loads((place.run / "verdict.json").read_text())["states"]["compressed_tensors"]
    assert math.isfinite(row["kl"]) and row["kl"] >= 0
    return "released; every weight and the KL are finite"


def remade(**changes: Any) -> Spoil:
    """A random Llama of other sizes."""

    def spoil(place: Place) -> None:
        known = json.loads((place.model / "config.json").read_text())
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**known | changes)).bfloat16().save_pretrained(place.model)

    return spoil


def expert_never_routed(place: Place) -> list[str]:
    """Of the logits a, -a, b and 0 the last is never the largest."""
    known = json.loads((place.model / "config.json").read_text())
    kept = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "rms_norm_eps",
    )
    torch.manual_seed(0)
    config = MixtralConfig(
        **{key: known[key] for key in kept},
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=1, max_position_embeddings=256,
        initializer_range=0.1, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = MixtralForCausalLM(config).bfloat16()
    with torch.no_grad():
        for block in model.model.layers:
            block.mlp.gate.weight[1] = -block.mlp.gate.weight[0]
            block.mlp.gate.weight[3] = 0
    (place.model / "model.safetensors").unlink()
    model.save_pretrained(place.model, save_original_format=True)
    return [*GPTQ, "until=calibrate"]


def named(place: Place) -> str:
    made = json.loads((place.stage("calibrate") / "manifest.json").read_text())
    without = made["metrics"]["without_statistics"]
    assert {f"model.layers.{i}.block_sparse_moe.experts.3.w{j}" for i in (0, 1) for j in (1, 2, 3)} <= set(without)
    table = (place.stage("calibrate") / "layers.csv").read_text()
    assert table.count("max, nearest: 0 tokens seen") >= 6
    return "rounded to nearest at the widest range; layers.csv and without_statistics name it"


def zero(found: Tensor) -> None:
    found.zero_()


CASES = [
    Case(
        "NaN weight",
        "calibrate",
        put(UP, math.nan),
        (f"{UP} holds nan at (0, 3) (1 such values)", "damaged or diverged", OTHER),
    ),
    Case("infinite weight", "calibrate", put(UP, math.inf), (f"{UP} holds inf at (0, 3)", "diverged", OTHER)),
    Case("NaN in the embedding", "calibrate", put(EMBED, math.nan), (f"{EMBED} holds nan at (0, 3)", OTHER)),
    Case("infinity in a norm", "calibrate", put(NORM, -math.inf), (f"{NORM} holds -inf at (3,)", OTHER)),
    Case(
        "a weight whose scale float16 cannot hold",
        "calibrate",
        put(UP, 3e6),
        (
            f"{UP.removesuffix('.weight')}: value 399770 has no finite float16 form (at most 65504)",
            "in 16 bits",
            "scheme.skip",
        ),
    ),
    Case(
        "an embedding beyond float16, to be served in float16",
        "export",
        both(put(EMBED, 1e6), given("train=null", "model.dtype=float16")),
        (f"{EMBED} holds 999424", "served in torch.float16, at most 65504", "set model.dtype to bfloat16"),
    ),
    Case(
        "finite weights that overflow on the text",
        "calibrate",
        tensors(lambda found: found[POST].fill_(1e38)),
        ("block 1 gives non-finite values on the calibration text in torch.float32", "choose another revision"),
    ),
    Case(
        "all-zero row",
        "calibrate",
        both(tensors(lambda found: zero(found[UP][5])), given(*GPTQ)),
        code=0,
        good=zeros(UP, lambda weight: weight[5]),
    ),
    Case(
        "all-zero group",
        "calibrate",
        both(tensors(lambda found: zero(found[UP][5, 32:])), given(*AWQ)),
        code=0,
        good=zeros(UP, lambda weight: weight[5, 32:]),
    ),
    Case(
        "all-zero layer",
        "calibrate",
        both(tensors(lambda found: zero(found[UP])), given(*GPTQ, "calibrate.transform=awq")),
        code=0,
        good=zeros(UP, lambda weight: weight),
    ),
    *(
        Case(
            f"dead calibration channels, {name}",
            "calibrate",
            both(tensors(lambda found: zero(found[POST][3:5])), given(*method)),
            code=0,
            good=finite,
        )
        for name, method in (("GPTQ", GPTQ), ("AWQ", AWQ))
    ),
    Case(
        "no channel alive before a whole MLP (a Hessian of zeros)",
        "calibrate",
        both(tensors(lambda found: zero(found[POST])), given(*GPTQ)),
        code=0,
        good=finite,
    ),
    Case("an expert that is never chosen", "calibrate", expert_never_routed, code=0, good=named),
    Case(
        "a group size that does not divide",
        "plan",
        given("scheme.weights.group_size=48"),
        ("the group size does not fit 14 of 14 linears", "48 does not divide the 64 inputs of", "64, 32, 16, 8"),
        code=2,
    ),
    Case(
        "sizes that are no multiple of what the kernel takes",
        "plan",
        both(remade(intermediate_size=72), given("train=null", "scheme.weights.group_size=null")),
        ("mlp.gate_proj has 72 outputs; vllm int4 takes multiples of 32", "Leave it unquantized (scheme.skip: ["),
        code=2,
    ),
    Case(
        "outputs that are no multiple of what the format packs",
        "plan",
        both(
            remade(intermediate_size=100),
            given("train=null", "scheme.weights.group_size=null", "export.formats=[awq]"),
        ),
        ("mlp.gate_proj has 100 outputs; vllm int4 takes multiples of 32", "or choose another of export.formats"),
        code=2,
    ),
    Case(
        "a format for the head, which is never quantized",
        "plan",
        given("scheme.overrides={lm_head: {dtype: int8, group_size: 32}}"),
        (
            "scheme.overrides: 'lm_head' names no linear of this model that is ever quantized",
            "names look like model.layers.0.",
        ),
        code=2,
    ),
    Case(
        "a pattern that names no layer",
        "plan",
        given("scheme.skip=['model.layers.7.*']"),
        ("scheme.skip: 'model.layers.7.*' names no linear of this model", "names look like"),
        code=2,
    ),
    Case(
        "asymmetric weights for GPTQ's layout, where a zero point of 0 wraps around",
        "recipe",
        given("scheme.weights.symmetric=false", "export.formats=[gptq]"),
        ("export.formats: gptq cannot hold int4-asym; these can: awq, compressed_tensors, dense",),
        code=2,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fault)
def test_numbers_that_are_no_good(case: Case, place: Place, capsys: pytest.CaptureFixture[str], note: Note) -> None:
    check(case, place, capsys, note)
