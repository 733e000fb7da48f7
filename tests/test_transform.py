"""What a transform must keep: the function of the block, in Hugging Face's own forward, and the statistics."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
)

from calibrate import observe
from calibrate.inputs import InputStats
from calibrate.table import rtn
from calibrate.transform import _fold, awq, smoothquant
from qat.arch import Arch, arch_of
from qat.arch.llama import ARCH as LLAMA
from qat.artifact import Artifact
from qat.checkpoint import SafetensorsFolder
from qat.quant import Quantized, dequantize, max_scale, quantize
from qat.scheme import Scheme, TensorFormat
from qat.sections import Calibrate

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
INT4 = Scheme(weights=TensorFormat(group_size=16))
FP8 = Scheme.model_validate(
    {
        "weights": {"dtype": "fp8_e4m3", "per": "channel"},
        "inputs": {"dtype": "fp8_e4m3", "per": "token", "dynamic": True},
    }
)
WINDOWS = torch.randint(0, 96, (4, 24), generator=torch.Generator().manual_seed(0))
NEEDS = {"amax", "mean_abs", "second_moment", "hessian"}
# gate_proj takes a router's place: it reads the norm, and is not one of the linears
ROUTED = replace(LLAMA, linears=tuple(name for name in LLAMA.linears if name != "mlp.gate_proj"))
MODELS: dict[str, tuple[type[PretrainedConfig], dict[str, Any], Arch | None]] = {
    "llama": (LlamaConfig, {}, None),
    "llama-biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}, None),
    "llama-mha": (LlamaConfig, {"num_key_value_heads": 4, "head_dim": 8}, None),
    "qwen2": (Qwen2Config, {"head_dim": 8}, None),
    "mistral": (MistralConfig, {"head_dim": 8}, None),
    "gemma": (Gemma3TextConfig, {"attention_bias": True, "layer_types": ["full_attention"] * 2}, None),
    "router": (LlamaConfig, {}, ROUTED),
}
METHODS: dict[str, tuple[ModuleType, Scheme]] = {"awq": (awq, INT4), "smoothquant": (smoothquant, FP8)}


class Case:
    """A random model with uneven channels, one block of it, and what its linears read."""

    def __init__(self, name: str, stored: torch.dtype = torch.bfloat16) -> None:
        kind, changed, arch = MODELS[name]
        self.config = kind(**{**SIZES, **changed})
        torch.manual_seed(1)
        self.model = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32).eval()
        self.arch = arch or arch_of(self.config)
        for key, parameter in self.model.named_parameters():
            if key.endswith("bias"):
                nn.init.normal_(parameter, std=0.1)
            elif parameter.ndim == 1:  # norms, uneven as in real models
                parameter.data = torch.exp(1.5 * torch.randn_like(parameter)) - self.arch.norm_offset
            elif key.startswith(self.arch.blocks):
                parameter.data *= 8 * torch.exp(0.7 * torch.randn(len(parameter), 1))
            parameter.data = parameter.data.to(stored).float()
        self.stored = stored
        self.prefix = f"{self.arch.blocks}.1."
        self.weights = self.block(self.model, INT4)
        self.seen: dict[str, Tensor] = {}
        self.inputs = self.watch(self.model)

    def block(self, model: nn.Module, scheme: Scheme) -> dict[str, Tensor]:
        """As a runner hands it over: quantized linears in float32, the rest as stored."""
        named = {name: p.detach().clone() for name, p in model.named_parameters() if name.startswith(self.prefix)}
        covered = {f"{self.prefix}{n}.weight" for n in self.arch.linears if scheme.format_of(self.prefix + n)}
        return {name: p if name in covered else p.to(self.stored) for name, p in named.items()}

    def watch(self, model: nn.Module) -> dict[str, InputStats]:
        stats: dict[str, InputStats] = {}
        handles = []
        for group in self.arch.shared_input:
            names = [self.prefix + name for name in group if name in self.arch.linears]
            module = model.get_submodule(names[0])
            stats |= dict.fromkeys(names, InputStats(NEEDS, module.in_features))  # type: ignore[arg-type]

            def hook(module: nn.Module, args: tuple[Tensor, ...], names: list[str], seen: InputStats) -> None:
                seen.update(args[0])
                self.seen.update(dict.fromkeys(names, args[0].flatten(0, -2).double()))

            handles.append(module.register_forward_pre_hook(partial(hook, names=names, seen=stats[names[0]])))
        with torch.no_grad():
            model(WINDOWS)
        for handle in handles:
            handle.remove()
        return stats

    def rescale(self, module: ModuleType, scheme: Scheme, **options: Any) -> dict[str, Tensor]:
        self.weights = self.block(self.model, scheme)
        return module.rescale(self.weights, self.inputs, self.arch, scheme, module.Options(**options), self.config)

    def transformed(self) -> nn.Module:
        model = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32).eval()
        model.load_state_dict({**self.model.state_dict(), **self.weights})
        return model


@pytest.mark.parametrize(
    ("name", "stored"),
    [*((name, torch.bfloat16) for name in MODELS), ("llama-biases", torch.float32), ("gemma", torch.float16)],
)
@pytest.mark.parametrize("method", METHODS)
def test_the_model_computes_the_same(name: str, method: str, stored: torch.dtype) -> None:
    case, (module, scheme) = Case(name, stored), METHODS[method]
    vectors = case.rescale(module, scheme)
    with torch.no_grad():
        before = case.model.double()(WINDOWS).logits
        after = case.transformed().double()(WINDOWS).logits
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5 * before.abs().max().item())
    pairs = case.arch.norm_pairs if method == "awq" else [p for p in case.arch.norm_pairs if "norm" in p[0]]
    changed = {key.partition("#")[0].removeprefix(case.prefix).removesuffix(".weight") for key in vectors}
    assert changed >= {pairs[0][0], pairs[0][1][0]}
    assert any(bool((v != 1).any()) for v in vectors.values())
    for key, tensor in case.weights.items():
        assert torch.isfinite(tensor.half()).all(), key


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_the_vectors_replay_it_from_the_parent(name: str, method: str) -> None:
    case, (module, scheme) = Case(name), METHODS[method]
    vectors = case.rescale(module, scheme)
    again = case.block(case.model, scheme)
    _fold.replay(again, vectors, case.arch)
    assert again.keys() == case.weights.keys()
    for key, tensor in case.weights.items():
        assert torch.equal(tensor, again[key]) and tensor.dtype == again[key].dtype, key
    untouched = again.keys() - {key.partition("#")[0] for key in vectors}
    parent = case.block(case.model, scheme)
    assert all(torch.equal(again[key], parent[key]) for key in untouched)
    with pytest.raises(ValueError, match="which this block does not have"):
        _fold.replay(again, {f"{case.prefix}mlp.other.weight#in": torch.ones(32)}, case.arch)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_statistics_are_those_of_the_transformed_model(name: str, method: str) -> None:
    case, (module, scheme) = Case(name), METHODS[method]
    case.rescale(module, scheme)
    fresh = case.watch(case.transformed())
    for linear, stats in case.inputs.items():
        for what in NEEDS:
            want = getattr(fresh[linear], what)
            torch.testing.assert_close(getattr(stats, what), want, rtol=1e-3, atol=1e-5 * want.max().item())


def slow_error(case: Case, pair: _fold.Pair, s: Tensor) -> float:
    """sum over tokens of |Q(W s) (x / s) - W x|^2, from the inputs themselves, row by row and group by group."""
    divisor, total = pair.to_inputs(s), 0.0
    for name, fmt in pair.formats.items():
        weight, x = case.weights[f"{name}.weight"], case.seen[name]
        for row in weight * divisor:
            parts = []
            for group in row.split(16):
                scale = max_scale(group.abs().max(), fmt).view(1, 1)
                parts.append(dequantize(Quantized(quantize(group[None], scale, None, fmt), scale), fmt)[0])
            total += ((x / divisor.double()) @ (torch.cat(parts) - row).double()).square().sum().item()
    return total


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma", "router"])
def test_awq_never_loses_and_knows_its_error(name: str, weight: bool) -> None:
    case, better = Case(name), 0
    for pair in _fold.pairs(case.weights, case.inputs, case.arch, INT4, case.config):
        factors = awq.search(pair, case.weights, awq.Options(weight=weight))
        one = torch.ones_like(factors.inputs)
        found, none = slow_error(case, pair, factors.inputs), slow_error(case, pair, one)
        estimated = awq.errors(pair, case.weights, [factors.inputs, one])
        torch.testing.assert_close(torch.tensor(estimated), torch.tensor([found, none]), rtol=1e-3, atol=0)
        assert found <= none * (1 + 1e-4)
        better += found < 0.95 * none
    assert better


def test_full_precision_linears_take_powers_of_two() -> None:
    """A skipped linear loses no digit, whether it reads the scaled input or makes it."""
    case = Case("llama-biases")
    names = ("self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj")
    scheme = Scheme(weights=TensorFormat(group_size=16), skip=tuple(f"*.{name}" for name in names))
    vectors = case.rescale(awq, scheme)
    parent, keys = case.block(case.model, scheme), [f"{case.prefix}{name}.weight" for name in names[:2]]
    for key in [*keys, f"{case.prefix}self_attn.v_proj.bias"]:
        factor = torch.ones(1)
        if f"{key}#in" in vectors:
            factor = factor * vectors[f"{key}#in"]
        if f"{key}#out" in vectors:
            factor = factor * vectors[f"{key}#out"][:, None]
        factor = vectors.get(key, factor)
        assert bool((factor != 1).any()) and bool((torch.frexp(factor).mantissa == 0.5).all())
        assert case.weights[key].dtype == torch.bfloat16
        assert torch.equal(case.weights[key].float() / factor, parent[key].float())
    down = f"{case.prefix}mlp.down_proj.weight"
    assert torch.equal(case.weights[down], parent[down])  # nothing that it feeds, or that feeds it, gains


def test_dead_channels_and_zeros_stay_as_they_are() -> None:
    case = Case("llama")
    with torch.no_grad():
        block = case.model.get_submodule(case.prefix[:-1])
        block.input_layernorm.weight[3] = 0
        block.self_attn.q_proj.weight[5] = 0
        block.self_attn.k_proj.weight[:, 16:] = 0
        block.mlp.up_proj.weight[7] = 0  # the input 7 of down_proj is always 0
    case.inputs = case.watch(case.model)
    vectors = case.rescale(awq, INT4)
    assert vectors[f"{case.prefix}self_attn.q_proj.weight#in"][3] == 1
    assert vectors[f"{case.prefix}input_layernorm.weight"][3] == 1
    assert vectors.get(f"{case.prefix}mlp.down_proj.weight#in", torch.ones(48))[7] == 1
    assert all(bool((torch.isfinite(v) & (v > 0)).all()) for v in vectors.values())
    assert all(bool(torch.isfinite(w).all()) for w in case.weights.values())


def test_a_model_on_the_grid_is_left_alone() -> None:
    case = Case("llama", torch.float32)
    with torch.no_grad():
        for name in case.arch.linears:
            weight = case.model.get_submodule(case.prefix + name).weight
            scale = max_scale(weight.view(len(weight), -1, 16).abs().amax(-1), INT4.weights)
            weight.copy_(dequantize(Quantized(quantize(weight, scale, None, INT4.weights), scale), INT4.weights))
    assert case.rescale(awq, INT4) == {}


def test_smoothquant_is_the_formula_of_the_paper() -> None:
    for alpha in (0.3, 0.8):
        case = Case("llama-mha")
        x = case.seen[f"{case.prefix}self_attn.q_proj"].abs().amax(0)
        w = torch.cat([case.weights[f"{case.prefix}self_attn.{n}_proj.weight"] for n in "qkv"]).abs().amax(0).double()
        vectors = case.rescale(smoothquant, FP8, alpha=alpha)
        found = vectors[f"{case.prefix}self_attn.v_proj.weight#in"].double()
        torch.testing.assert_close(found, x**alpha / w ** (1 - alpha), rtol=2**-8, atol=0)
        assert not [key for key in vectors if key.endswith("#out")]


def test_wrong_schemes_are_refused() -> None:
    case = Case("llama")
    with pytest.raises(ValueError, match=r"awq judges the error of weights only.*use smoothquant or none"):
        case.rescale(awq, FP8)
    with pytest.raises(ValueError, match=r"scheme\.inputs is null; set it, or use awq or none"):
        case.rescale(smoothquant, INT4)


def test_heads_that_do_not_fit_are_named() -> None:
    case = Case("llama")
    case.config = SimpleNamespace(head_dim=24)
    with pytest.raises(ValueError, match=r"v_proj gives 32 channels and .*o_proj reads 64.*heads of 24"):
        case.rescale(awq, INT4)


@pytest.mark.parametrize("exact", [False, True])
def test_only_factors_that_can_be_stored_are_allowed(exact: bool) -> None:
    """Past float16 in a bias or a skipped weight, infinite, zero: the channel keeps 1."""
    weights = {"up.weight": torch.ones(6, 4), "up.bias": torch.full((6,), 100.0), "down.weight": torch.ones(4, 6)}
    weights["down.weight"][1, 4] = 6e4
    pair = _fold.Pair("up", False, 0.0, ("down",), {}, {}, exact, 6, 6, 6)
    wanted = torch.tensor([2.1, 1e-4, torch.inf, 0.0, 8.0, -1.0])
    factors = _fold.allowed(pair, weights, wanted)
    kept = [2.0, 1, 1, 1, 1, 1] if exact else [2.1, 1, 1, 1, 8, 1]
    torch.testing.assert_close(factors.inputs, torch.tensor(kept), rtol=2**-8, atol=0)
    torch.testing.assert_close(factors.stored, 1 / torch.tensor(kept))
    assert 100 / factors.inputs[0] == (100 / factors.inputs[0]).bfloat16()  # what the linears get is what the bias left


def test_a_run_on_experts_keeps_the_router_exact(tmp_path: Path) -> None:
    """Mixtral through the runner: the router takes powers of two, and the parent's block can be had again."""
    torch.manual_seed(2)
    config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data = torch.exp(2 * torch.randn(parameter.shape)).bfloat16()
    model.save_pretrained(tmp_path / "parent")
    chosen = Calibrate.model_validate({"transform": "awq", "range": "max"})
    methods = {question: getattr(chosen, question) for question in observe.QUESTIONS}
    tensors, out = SafetensorsFolder(tmp_path / "parent"), tmp_path / "out"
    observe.run(config, tensors, INT4, WINDOWS, methods, tmp_path / "parent", out)
    vectors = load_file(out / "transform-00001.safetensors")
    router = "model.layers.1.block_sparse_moe.gate.weight"
    factor = vectors[f"{router}#in"]
    assert bool((factor != 1).any()) and bool((torch.frexp(factor).mantissa == 0.5).all())
    artifact = Artifact(out)
    assert torch.equal(artifact.get(router).float(), tensors.get(router).float() * factor)
    norm = "model.layers.1.post_attention_layernorm.weight"
    assert torch.equal(artifact.get(norm).float() * factor, tensors.get(norm).float())
    for linear in artifact.formats:
        if (name := f"{linear}.weight").startswith("model.layers.1."):
            full = {name: tensors.get(name).float()}
            _fold.replay(full, {key: v for key, v in vectors.items() if key.startswith(name)}, arch_of(config))
            q = rtn(full[name], INT4.weights)
            assert torch.equal(artifact.quantized(linear).codes, q.codes), name
