"""The block-by-block runner on tiny random models: what is stored, what is refused, what a resume gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

from calibrate import observe, table
from calibrate.rtn import Rtn
from qat.arch import arch_of
from qat.artifact import Artifact
from qat.checkpoint import SafetensorsFolder
from qat.quant import dequantize, quantize
from qat.scheme import Scheme, TensorFormat
from qat.sections import Calibrate

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
INT4 = Scheme(weights=TensorFormat(group_size=16))
STATIC = Scheme.model_validate(
    {"weights": {"dtype": "fp8_e4m3", "per": "tensor"}, "inputs": {"dtype": "fp8_e4m3", "per": "tensor"}}
)
DYNAMIC = Scheme.model_validate(
    {
        "weights": {"dtype": "fp8_e4m3", "per": "channel"},
        "inputs": {"dtype": "fp8_e4m3", "per": "token", "dynamic": True},
    }
)
WINDOWS = torch.randint(0, 96, (5, 24), generator=torch.Generator().manual_seed(0))


def make(folder: Path, kind: type[PretrainedConfig] = LlamaConfig, seed: int = 0, **changed: Any) -> Path:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(kind(**{**SIZES, **changed}))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make(tmp_path_factory.mktemp("llama"))
    (folder / "LICENSE").write_text("free\n")
    return folder


def run(parent: Path, out: Path, scheme: Scheme = INT4, windows: torch.Tensor | None = WINDOWS, **how: Any) -> dict:
    asked = {q: how.pop(q) for q in observe.QUESTIONS if q in how}
    methods = Calibrate(**asked)
    chosen = {q: getattr(methods, q) for q in observe.QUESTIONS}
    config = AutoConfig.from_pretrained(parent)
    return observe.run(config, SafetensorsFolder(parent), scheme, windows, chosen, parent, out, batch=2, **how)


def weights_bytes(folder: Path) -> dict[str, bytes]:
    """Every file but the one that holds times."""
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name != table.SECONDS}


@pytest.mark.parametrize("range_", ["max", "mse", "activation", "kl"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_artifact_holds_the_quantized_model(llama: Path, tmp_path: Path, range_: str, symmetric: bool) -> None:
    scheme = Scheme(weights=TensorFormat(group_size=16, symmetric=symmetric))
    metrics = run(llama, tmp_path / "out", scheme, range=range_)
    artifact, parent = Artifact(tmp_path / "out"), SafetensorsFolder(llama)
    assert metrics["linears"] == len(artifact.formats) == 21
    assert set(artifact.names()) == set(parent.names())
    for name in parent.names():
        full, back = parent.get(name), artifact.get(name)
        if name.removesuffix(".weight") not in artifact.formats:
            assert torch.equal(full, back) and full.dtype == back.dtype
            continue
        q, fmt = artifact.quantized(name.removesuffix(".weight")), artifact.formats[name.removesuffix(".weight")]
        assert torch.equal(q.codes, quantize(full.float(), q.scale, q.zero, fmt))
        assert torch.equal(q.codes, quantize(dequantize(q, fmt), q.scale, q.zero, fmt))
    for file in ("config.json", "generation_config.json", "LICENSE"):
        assert (tmp_path / "out" / file).read_bytes() == (llama / file).read_bytes()
    rows = table.read(tmp_path / "out" / table.TABLE)
    assert {row["layer"] for row in rows} == set(artifact.formats)
    if range_ == "activation":
        assert metrics["weighted_error"] < metrics["weighted_error_rtn"]


def test_statistics_are_those_of_the_whole_model(llama: Path, tmp_path: Path) -> None:
    """The stored input scale against the inputs that Hugging Face's own forward pass gives each linear."""
    run(llama, tmp_path / "out", STATIC, range="max")
    artifact = Artifact(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(llama)
    largest: dict[str, float] = {}
    for name in artifact.formats:
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, args, name=name: largest.__setitem__(name, args[0].abs().max().item())
        )
    with torch.no_grad():
        model(WINDOWS)
    for name in artifact.formats:
        scale = artifact.raw(f"{name}.input_scale")
        assert scale.shape == (1,) and scale.dtype == torch.float32
        torch.testing.assert_close(scale.item(), largest[name] / 448, rtol=1e-4, atol=0)


def test_fp8_scales_are_shared_where_engines_fuse(llama: Path, tmp_path: Path) -> None:
    run(llama, tmp_path / "out", STATIC, range="max")
    artifact, parent = Artifact(tmp_path / "out"), SafetensorsFolder(llama)
    baseline = Rtn(parent, arch_of(AutoConfig.from_pretrained(llama)), STATIC)
    for group in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        names = [f"model.layers.1.{local}" for local in group]
        amax = max(parent.get(f"{n}.weight").abs().max() for n in names)
        for name in names:
            assert torch.equal(artifact.raw(f"{name}.scale"), (amax / 448).view(1, 1))
            assert torch.equal(artifact.get(f"{name}.weight"), baseline.get(f"{name}.weight"))


def test_dynamic_fp8_and_max_need_no_text(llama: Path, tmp_path: Path) -> None:
    assert run(llama, tmp_path / "fp8", DYNAMIC, None, range="max")["tokens"] == 0
    artifact = Artifact(tmp_path / "fp8")
    assert artifact.raw("model.layers.0.mlp.up_proj.scale").shape == (48, 1)
    assert artifact.optional("model.layers.0.mlp.up_proj.input_scale") is None
    with pytest.raises(ValueError, match=r"calibration text is needed for second_moment; set data\.calibration"):
        run(llama, tmp_path / "x", INT4, None)


def test_rtn_is_the_artifact_of_range_max(llama: Path, tmp_path: Path) -> None:
    scheme = Scheme(weights=TensorFormat(group_size=16), skip=("lm_head", "model.layers.0.*"))
    run(llama, tmp_path / "out", scheme, None, range="max")
    artifact, parent = Artifact(tmp_path / "out"), SafetensorsFolder(llama)
    baseline = Rtn(parent, arch_of(AutoConfig.from_pretrained(llama)), scheme)
    for name in parent.names():
        assert torch.equal(baseline.get(name), artifact.get(name)), name
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(artifact.get(name), parent.get(name))


def test_a_model_on_the_grid_comes_back_unchanged(llama: Path, tmp_path: Path) -> None:
    for symmetric in (True, False):
        scheme = Scheme(weights=TensorFormat(group_size=16, symmetric=symmetric))
        out, dense = tmp_path / f"out{symmetric}", tmp_path / f"dense{symmetric}"
        run(llama, out, scheme)
        artifact = Artifact(out)
        dense.mkdir()
        save_file({name: artifact.get(name) for name in artifact.names()}, dense / "model.safetensors")
        (dense / "config.json").write_bytes((llama / "config.json").read_bytes())
        for range_ in ("max", "mse", "activation", "kl"):
            again = tmp_path / f"again{symmetric}{range_}"
            assert run(dense, again, scheme, range=range_)["error"] == 0
            for name in artifact.names():
                assert torch.equal(Artifact(again).get(name), artifact.get(name)), (range_, name)


def test_biases_of_qwen2_are_kept_on_the_grid(tmp_path: Path) -> None:
    parent = make(tmp_path / "qwen2", Qwen2Config, tie_word_embeddings=False)
    metrics = run(parent, tmp_path / "out")
    artifact, tensors = Artifact(tmp_path / "out"), SafetensorsFolder(parent)
    name = "model.layers.1.self_attn.q_proj.bias"
    assert torch.equal(artifact.get(name), tensors.get(name).bfloat16().float())
    assert 0 < metrics["largest_bias_change"] < 0.01
    assert torch.equal(artifact.get("lm_head.weight"), tensors.get("lm_head.weight"))


@pytest.mark.parametrize("range_", ["activation", "kl"])
def test_a_resumed_run_gives_the_same_bytes(llama: Path, tmp_path: Path, range_: str) -> None:
    run(llama, tmp_path / "whole", range=range_)

    def stop(done: int, total: int, error: float) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(llama, tmp_path / "out", range=range_, progress=stop)
    assert run(llama, tmp_path / "out", range=range_)["blocks_reused"] == 2
    assert weights_bytes(tmp_path / "out") == weights_bytes(tmp_path / "whole")
    assert run(llama, tmp_path / "out", range=range_)["blocks_reused"] == 3
    assert weights_bytes(tmp_path / "out") == weights_bytes(tmp_path / "whole")


def test_the_group_size_error_names_every_layer_and_the_ways_out(tmp_path: Path) -> None:
    parent = make(tmp_path / "model", hidden_size=48, intermediate_size=80)
    with pytest.raises(ValueError) as caught:
        run(parent, tmp_path / "out", Scheme(weights=TensorFormat(group_size=32)))
    text = str(caught.value)
    assert "does not fit 21 of 21 linears" in text
    assert "32 does not divide the 48 inputs of self_attn.q_proj, self_attn.k_proj" in text
    assert "32 does not divide the 80 inputs of mlp.down_proj (3 linears)" in text
    assert "divide every layer's inputs: 16, 8." in text
    assert "'*.q_proj': {dtype: int4, group_size: 48}" in text
    assert not (tmp_path / "out").exists()
    fitting = {"*.down_proj": {"group_size": 40}}
    scheme = Scheme.model_validate({"weights": {"group_size": 24}, "overrides": fitting})
    run(parent, tmp_path / "out", scheme)
    assert Artifact(tmp_path / "out").raw("model.layers.0.mlp.down_proj.scale").shape == (48, 2)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_a_weight_that_is_not_finite_is_named(llama: Path, tmp_path: Path, name: str) -> None:
    tensors = load_file(llama / "model.safetensors")
    tensors[name][3, 5] = torch.nan
    bad = tmp_path / "bad"
    bad.mkdir()
    save_file(tensors, bad / "model.safetensors")
    (bad / "config.json").write_bytes((llama / "config.json").read_bytes())
    with pytest.raises(ValueError, match=rf"{name} holds nan at \(3, 5\).*fetch them again"):
        run(bad, tmp_path / "out", range="max")


def test_a_value_past_float16_is_named(llama: Path, tmp_path: Path) -> None:
    tensors = load_file(llama / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = 1e6
    bad = tmp_path / "bad"
    bad.mkdir()
    save_file(tensors, bad / "model.safetensors")
    (bad / "config.json").write_bytes((llama / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.down_proj: .*has no finite float16 form"):
        run(bad, tmp_path / "out", range="max")


def test_what_cannot_work_is_refused_before_any_work(llama: Path, tmp_path: Path) -> None:
    cases: list[tuple[str, dict[str, Any]]] = [
        ("calibrate.range: activation does not do fp8_e4m3; set it to max", {"scheme": STATIC}),
        ("names no linear of this model", {"scheme": Scheme(skip=("*.o_prj",), weights=TensorFormat(group_size=16))}),
        ("leaves no linear", {"scheme": Scheme(skip=("model.layers.*",), weights=TensorFormat(group_size=16))}),
    ]
    for message, how in cases:
        with pytest.raises(ValueError, match=message):
            run(llama, tmp_path / "out", **how)
        assert not (tmp_path / "out").exists()
