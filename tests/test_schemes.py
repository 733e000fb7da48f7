"""Number formats against compressed-tensors' own quantization, and against slow loops where it has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle import forward as library
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn
from transformers import DynamicCache

from calibrate.inputs import InputStats
from calibrate.range import max as widest
from calibrate.round import nearest
from calibrate.table import rtn
from qat import coverage, plugins
from qat.artifact import block_tensors
from qat.fakequant import QuantizedCache, attach_cache
from qat.model import Model
from qat.quant import Quantized, dequantize, fake_quant_cache, fake_quant_input, max_scale, quantize, to_grid
from qat.scheme import Scheme, TensorFormat
from tests.artifacts import config_of

SETTINGS = settings(max_examples=30, deadline=None)
INT8 = TensorFormat(dtype="int8", group_size=8)
BLOCKS = TensorFormat(dtype="fp8_e4m3", per="block")
FORMATS = {
    "int8": (INT8, {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 8}),
    "int8-channel": (TensorFormat(dtype="int8"), {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "fp8-block": (
        BLOCKS,
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    ),
}
TOKEN8 = TensorFormat(dtype="int8", per="token", dynamic=True)
GROUP8 = TensorFormat(dtype="fp8_e4m3", per="group", group_size=128, dynamic=True)
shapes = st.tuples(st.integers(1, 300), st.integers(1, 40).map(lambda groups: 8 * groups))


def random(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.rand(shape[-1], generator=generator) * 0.1


@pytest.mark.parametrize("name", FORMATS)
@SETTINGS
@given(shape=shapes, seed=st.integers(0, 2**31))
def test_codes_and_weights_are_the_librarys(name: str, shape: tuple[int, int], seed: int) -> None:
    fmt, said = FORMATS[name]
    weight, args = random(seed, *shape), QuantizationArgs(**said)
    q = rtn(weight, fmt)
    assert q.scale.shape == fmt.scale_shape(*shape) and q.zero is None
    wide = weight
    if name == "fp8-block":  # the library pads a ragged weight before it quantizes
        wide = nn.functional.pad(weight, (0, -shape[1] % 128, 0, -shape[0] % 128))
    codes = library.quantize(wide, q.scale, None, args, dtype=args.pytorch_dtype())[: shape[0], : shape[1]]
    assert codes.dtype == q.codes.dtype and torch.equal(codes.float(), q.codes.float())
    assert torch.equal(library.dequantize(q.codes, q.scale, None, args), dequantize(q, fmt))


@pytest.mark.parametrize("name", FORMATS)
@SETTINGS
@given(shape=shapes, seed=st.integers(0, 2**31))
def test_quantizing_inverts_dequantizing(name: str, shape: tuple[int, int], seed: int) -> None:
    fmt, generator = FORMATS[name][0], torch.Generator().manual_seed(seed)
    scale = torch.rand(fmt.scale_shape(*shape), generator=generator) * 0.05 + 2e-4
    codes = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    floats = (codes * 3.5).to(torch.float8_e4m3fn)
    q = Quantized(codes, to_grid(scale)) if fmt.is_int else Quantized(floats, scale)
    again = quantize(dequantize(q, fmt), q.scale, None, fmt)
    assert torch.equal(again.float(), q.codes.float())


@SETTINGS
@given(rows=st.integers(1, 400), columns=st.integers(1, 300), seed=st.integers(0, 2**31))
def test_each_block_has_the_scale_of_its_own_largest_weight(rows: int, columns: int, seed: int) -> None:
    weight = random(seed, rows, columns)
    scale, zero = widest.find(weight, BLOCKS, None, widest.Options())
    q = nearest.codes(weight, scale, zero, BLOCKS, None, nearest.Options())
    for i in range(0, rows, 128):
        for j in range(0, columns, 128):
            block, codes = weight[i : i + 128, j : j + 128], q.codes[i : i + 128, j : j + 128]
            assert scale[i // 128, j // 128] == block.abs().max() / 448
            assert torch.equal(codes.float(), (block / scale[i // 128, j // 128]).to(torch.float8_e4m3fn).float())


def test_int8_scales_lie_on_the_grid_and_lose_at_most_half_a_step_but_for_the_end() -> None:
    weight = random(3, 9, 64)
    q = rtn(weight, INT8)
    assert torch.equal(q.scale, to_grid(q.scale))
    error = ((dequantize(q, INT8) - weight).view(9, -1, 8).abs() / q.scale[..., None]).flatten(1)
    assert (error <= 0.5001)[q.codes.abs() < 127].all()
    assert error.max() <= 0.5 + 0.5 + 127.5 * 2**-8  # clipped by half a step and by the rounding of the scale


@pytest.mark.parametrize("name", ["mse", "activation", "kl"])
@pytest.mark.parametrize("fmt", [INT8, TensorFormat(dtype="int8")], ids=str)
def test_no_int8_range_is_worse_than_the_widest_on_its_own_objective(name: str, fmt: TensorFormat) -> None:
    module, x, weight = plugins.find("calibrate.range", name), random(8, 200, 64) * 50, random(9, 12, 64)
    stats = InputStats(module.NEEDS, 64)
    stats.update(x, torch.ones(200))
    scale, zero = module.find(weight, fmt, stats, module.Options())
    assert zero is None and torch.equal(scale, to_grid(scale))
    hessian = {"mse": torch.eye(64), "activation": (x.T @ x).diag().diag(), "kl": x.T @ x}[name].double()
    found = Quantized(quantize(weight, scale, None, fmt), scale)
    ours, plain = (
        ((e := (dequantize(q, fmt) - weight).double()) @ hessian * e).sum(-1) for q in (found, rtn(weight, fmt))
    )
    assert (ours <= plain * (1 + 1e-2)).all() and ours.sum() <= plain.sum() * (1 + 1e-6)


@SETTINGS
@given(tokens=st.integers(1, 5), columns=st.integers(1, 300), seed=st.integers(0, 2**31))
def test_int8_inputs_are_rounded_token_by_token(tokens: int, columns: int, seed: int) -> None:
    x = random(seed, 2, tokens, columns) * 30
    back = fake_quant_input(x, TOKEN8)
    for token, ours in zip(x.flatten(0, 1), back.flatten(0, 1), strict=True):
        scale = max(abs(v) for v in token.tolist()) / 127
        for value, found in zip(token.tolist(), ours.tolist(), strict=True):
            assert abs(found - value) <= scale * 0.50001
            assert abs(found / (scale or 1) - round(found / (scale or 1))) < 1e-3


def test_fp8_inputs_in_groups_are_the_librarys() -> None:
    args = QuantizationArgs(num_bits=8, type="float", strategy="group", group_size=128, dynamic=True)
    x = random(5, 3, 7, 512) * 20
    scale, zero = compute_dynamic_scales_and_zp(x, args, nn.Identity())
    expected = library.fake_quantize(x, scale, zero, args)
    assert torch.allclose(fake_quant_input(x, GROUP8), expected, rtol=1e-6)


def test_a_ragged_last_group_of_inputs_has_a_scale_of_its_own() -> None:
    x = random(6, 4, 300)
    parts = [fake_quant_input(part, GROUP8) for part in x.split(128, -1)]
    assert torch.equal(fake_quant_input(x, GROUP8), torch.cat(parts, -1))
    assert torch.equal(fake_quant_input(torch.zeros(2, 3), TOKEN8), torch.zeros(2, 3))


def test_the_cache_saturates_and_keeps_what_fp8_holds() -> None:
    scale = torch.tensor([0.5])
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()]
    assert torch.equal(fake_quant_cache(every * scale, scale), every * scale)
    assert fake_quant_cache(torch.tensor([1e4, -1e4]), scale).tolist() == [224.0, -224.0]


def test_attention_sees_rounded_keys_and_values_and_passes_the_gradient() -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor, cache: Any = None) -> tuple[Tensor, Tensor]:
            return cache.update(x, 2 * x, 0)

    module, x = Attention(), random(7, 2, 3, 4, 5).requires_grad_()
    attach_cache(module, QuantizedCache(torch.tensor([0.01]), torch.tensor([0.02])))
    keys, values = module(x, cache=DynamicCache())
    assert torch.equal(keys, fake_quant_cache(x, torch.tensor([0.01])))
    assert torch.equal(values, fake_quant_cache(2 * x, torch.tensor([0.02])))
    (keys.sum() + values.sum()).backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0))


def test_attention_without_a_known_cache_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"Identity takes no cache under a known name \(input\)"):
        attach_cache(nn.Identity(), DynamicCache())


def test_int8_codes_are_stored_one_to_a_byte() -> None:
    q = rtn(random(8, 5, 16), INT8)
    stored = block_tensors("x", q, None, None)
    assert stored["x.codes"].dtype == torch.int8 and torch.equal(stored["x.codes"], q.codes)


FP8 = {"dtype": "fp8_e4m3"}
PER_TOKEN = {"per": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("scheme", "kinds"),
    [
        ({"weights": {"dtype": "int8"}}, {"int8"}),
        (
            {"weights": {"dtype": "int8", "group_size": 64}, "overrides": {"*.o_proj": {"group_size": 64}}},
            {"int8", "int4"},
        ),
        ({"weights": {"dtype": "int8"}, "inputs": {"dtype": "int8", **PER_TOKEN}}, {"w8a8"}),
        (
            {"weights": {**FP8, "per": "block"}, "inputs": {**FP8, "per": "group", "group_size": 128, "dynamic": True}},
            {"fp8-block"},
        ),
        ({"weights": {"group_size": 32}, "kv_cache": {**FP8, "per": "tensor"}}, {"int4"}),
    ],
)
def test_schemes_that_engines_run(scheme: dict[str, Any], kinds: set[str]) -> None:
    parsed = Scheme.model_validate(scheme)
    assert all(str(fmt) in str(parsed) for fmt in parsed.formats)
    assert parsed.kinds == kinds and Scheme.model_validate(parsed.model_dump()) == parsed


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ({"weights": {"dtype": "int8", "symmetric": False}}, "int8 has no zero point here"),
        ({"weights": {"dtype": "int8", "per": "block"}}, "int8 takes per: group, channel or token, not block"),
        ({"weights": {"dtype": "int8", "per": "token"}}, "never dynamic or per token"),
        ({"weights": {**FP8, "group_size": 64}}, "not a group_size"),
        ({"weights": {**FP8, "per": "block"}}, "per: block} with inputs {dtype: fp8_e4m3, per: group, group_size: 128"),
        (
            {"weights": {"dtype": "int8", "group_size": 64}, "inputs": {"dtype": "int8", **PER_TOKEN}},
            "run by no engine",
        ),
        ({"weights": {"dtype": "int8"}, "inputs": {"dtype": "int8", "per": "channel"}}, "per: token, dynamic: true"),
        ({"weights": {"group_size": 64}, "inputs": {"dtype": "int8", **PER_TOKEN}}, "run by no engine"),
        ({"weights": {**FP8, "per": "block"}, "inputs": {**FP8, **PER_TOKEN}}, "run by no engine"),
        (
            {"weights": {"dtype": "int8"}, "inputs": {"dtype": "int8", **PER_TOKEN}, "overrides": {"*": {}}},
            "with scheme.inputs all linears are alike",
        ),
        ({"weights": {}, "overrides": {"*": {**FP8}}}, "overrides may mix int4 and int8"),
        ({"kv_cache": {"dtype": "int8"}}, "kv_cache is null or"),
        ({"kv_cache": {**FP8, "per": "tensor", "dynamic": True}}, "kv_cache is null or"),
    ],
)
def test_schemes_that_no_engine_runs_are_refused(scheme: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as error:
        Scheme.model_validate(scheme)
    assert words in str(error.value)


def test_the_fp8_scale_of_nothing_is_not_zero() -> None:
    assert max_scale(torch.zeros(1), BLOCKS) > 0
    q = rtn(torch.zeros(3, 130), BLOCKS)
    assert not dequantize(q, BLOCKS).any()


def model() -> Model:
    return Model(config_of("llama"), Meta())


class Meta:
    """A source of no tensors: what is checked here looks at shapes only."""

    def names(self) -> list[str]:
        return []

    def get(self, name: str) -> Tensor:
        raise KeyError(name)


def test_overrides_that_split_what_engines_fuse_are_refused_before_any_work() -> None:
    mlp = {"*.gate_proj": {"dtype": "int8"}, "*.up_proj": {"dtype": "int8"}}
    good = {"weights": {"group_size": 32}, "overrides": mlp}
    found = coverage.formats(model().arch, model().in_features, Scheme.model_validate(good))
    assert {str(found[f"model.layers.{i}.mlp.up_proj"]) for i in range(2)} == {"int8-channel"}
    bad = {"weights": {"group_size": 32}, "overrides": {"model.layers.1.*v_proj": {"dtype": "int8"}}}
    with pytest.raises(
        ValueError,
        match=r"layers\.1\.self_attn\.v_proj would be int8-channel, .*q_proj int4-g32.*k_proj, v_proj as one",
    ):
        coverage.formats(model().arch, model().in_features, Scheme.model_validate(bad))


def test_skipping_part_of_what_engines_fuse_is_refused() -> None:
    arch = model().arch
    coverage.whole_groups(
        arch, 2, Scheme.model_validate({"skip": ["*.down_proj", "*.0.*q_proj", "*.0.*k_proj", "*.0.*v_proj"]})
    )
    with pytest.raises(ValueError, match=r"leaves model\.layers\.1\.mlp\.up_proj as .*run gate_proj, up_proj as one"):
        coverage.whole_groups(arch, 2, Scheme.model_validate({"skip": ["model.layers.1.mlp.up_proj"]}))


def test_blocks_need_no_whole_number_of_them() -> None:
    scheme = {"weights": {**FP8, "per": "block"}, "inputs": {**FP8, "per": "group", "group_size": 128, "dynamic": True}}
    assert len(coverage.formats(model().arch, model().in_features, Scheme.model_validate(scheme))) == 14
    wrong = Scheme.model_validate({"weights": {"dtype": "int8", "group_size": 40}})
    with pytest.raises(ValueError, match=r"(?s)group size does not fit.*dtype: int8, group_size: 64"):
        coverage.formats(model().arch, model().in_features, wrong)
