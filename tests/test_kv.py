"""The recorder in the place of a cache, against what transformers' own cache holds afterwards."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from calibrate.histogram import Histogram
from calibrate.kv import KvRecorder
from calibrate.range import kl
from calibrate.range import max as widest
from qat.checkpoint import SafetensorsFolder
from qat.model import Model
from qat.scheme import TensorFormat

FP8 = TensorFormat(dtype="fp8_e4m3", per="tensor")
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
EXTRA: dict[type[PretrainedConfig], dict[str, object]] = {
    LlamaConfig: {},
    Qwen3Config: {},
    Gemma3TextConfig: {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    MixtralConfig: {"num_local_experts": 4},
}
WINDOWS = torch.randint(0, 96, (6, 24), generator=torch.Generator().manual_seed(0))


def counted(x: Tensor) -> Histogram:
    histogram = Histogram()
    histogram.update(x)
    return histogram


def cached(model: nn.Module, cache: DynamicCache) -> dict[str, object]:
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    return {name: cache, "use_cache": True}


def check(recorder: KvRecorder, cache: DynamicCache) -> None:
    assert sorted(recorder.keys) == sorted(recorder.values) == [0, 1, 2]
    found = recorder.scales(widest.find_input, FP8, widest.InputOptions())
    for index, layer in enumerate(cache.layers):
        for side, states, scale in (
            (recorder.keys, layer.keys, found[index].k_scale),
            (recorder.values, layer.values, found[index].v_scale),
        ):
            assert torch.equal(side[index].counts, counted(states).counts)
            assert torch.equal(scale, states.abs().max().view(1) / 448)


@pytest.mark.parametrize("kind", EXTRA)
@torch.no_grad()
def test_it_counts_what_the_cache_of_transformers_holds(kind: type[PretrainedConfig]) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**SIZES, **EXTRA[kind])).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("k_norm.weight"):
            nn.init.uniform_(parameter, 0.5, 2)
    cache, recorder, handles = DynamicCache(config=model.config), KvRecorder(), []
    expected = model(WINDOWS, **cached(model, cache)).logits
    for block in model.model.layers:  # as the runner does: the model makes the arguments, one is replaced
        replace = recorder.argument(block)
        handles.append(block.register_forward_pre_hook(lambda _, a, kw, r=replace: (a, kw | r), with_kwargs=True))
    torch.testing.assert_close(model(WINDOWS, use_cache=False).logits, expected)
    check(recorder, cache)


@torch.no_grad()
def test_in_the_streamed_model_batches_add_up(tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).eval()
    whole.save_pretrained(tmp_path)
    cache = DynamicCache(config=whole.config)
    whole(WINDOWS, **cached(whole, cache))
    model, recorder = Model(whole.config, SafetensorsFolder(tmp_path)), KvRecorder()
    with model.ends():
        states = [model.embed(ids) for ids in WINDOWS.split(1)]
    for index in range(3):
        with model.block(index) as block:
            kwargs = model.kwargs(WINDOWS.shape[1])[index] | recorder.argument(block)
            states = [block(state, **kwargs) for state in states]
    for index, layer in enumerate(cache.layers):  # products of another batch size differ in the last bits
        for side, expected in ((recorder.keys, layer.keys), (recorder.values, layer.values)):
            assert side[index].num_samples == expected.numel()
            torch.testing.assert_close(side[index].amax, expected.abs().max())


def test_what_is_refused_names_the_layer() -> None:
    recorder = KvRecorder()
    x = torch.ones(1, 2, 3, 4)
    keys, values = recorder.update(x, x, 7)
    assert keys is x and values is x
    with pytest.raises(ValueError, match="KV cache of layer 7: entropy calibration needs 1000 values"):
        recorder.scales(kl.find_input, FP8, kl.InputOptions())
    with pytest.raises(ValueError, match=r"Linear takes none of cache, past_key_values; leave scheme\.kv_cache out"):
        recorder.argument(nn.Linear(2, 2))
