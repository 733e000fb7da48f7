"""What an engine should compute for a directory: Hugging Face in float32 on its dequantized weights.

Activations and the KV cache are rounded as the format asks for. Imports nothing of Tare.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

Windows = list[list[int]]


def rounded(how: str, static: float | None, module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Activations (..., K) rounded while serving: `int8` or `fp8`, a scale for each token or, `fp8-128`, 128 inputs.

    static: the scale of `fp8-static`.
    """
    if static is not None:
        return ((inputs[0] / static).clamp(-448, 448).to(torch.float8_e4m3fn).float() * static,)
    values = inputs[0].unflatten(-1, (-1, 128)) if how == "fp8-128" else inputs[0]
    largest = values.abs().amax(-1, keepdim=True).clamp(min=1e-12)
    if how == "int8":
        values = torch.round(values / (largest / 127)).clamp(-128, 127) * (largest / 127)
    else:
        values = (values / (largest / 448)).to(torch.float8_e4m3fn).float() * (largest / 448)
    return (values.view_as(inputs[0]),)


def inputs_of(directory: Path) -> str | None:
    """How the format rounds the inputs of its linears while serving."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    config = config.get("base", config)
    if config["quant_method"] == "modelopt":
        return {"FP8_PB_WO": "fp8-128", "FP8": "fp8-static"}.get(config["quant_algo"], "fp8")
    groups = config.get("config_groups") or {}
    activations = next((g["input_activations"] for g in groups.values() if g.get("input_activations")), None)
    if activations is None or not activations["dynamic"]:
        return "fp8-static" if activations else None
    return "fp8-128" if activations["strategy"] == "group" else {"int": "int8", "float": "fp8"}[activations["type"]]


def biases_of(directory: Path) -> dict[str, Tensor]:
    """Every bias of a linear, `comp_bias` included, by the name of the linear."""
    found = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as f:
            for name in f.keys():  # noqa: SIM118 - not a dict
                owner, _, part = name.rpartition(".")
                if part in ("bias", "comp_bias"):
                    found[owner] = f.get_tensor(name)
    return found


def static_of(directory: Path) -> dict[str, float]:
    """Static input scales by the name of the linear; {} where there are none."""
    found = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as f:
            scales = [name for name in f.keys() if name.endswith(".input_scale")]  # noqa: SIM118 - not a dict
            found |= {name.removesuffix(".input_scale"): f.get_tensor(name).item() for name in scales}
    return found


def cache_of(directory: Path) -> list[tuple[float, float]]:
    """Static scales of keys and values of each layer, of a compressed-tensors directory that has them."""
    found: dict[str, float] = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as f:
            for name in f.keys():  # noqa: SIM118 - not a dict
                if name.endswith(("self_attn.k_scale", "self_attn.v_scale")):
                    found[name] = f.get_tensor(name).item()
    layers = range(len(found) // 2)
    return [tuple(found[f"model.layers.{i}.self_attn.{part}_scale"] for part in "kv") for i in layers]  # type: ignore


def fp8(value: Tensor, scale: float) -> Tensor:
    """What comes back from an fp8 cache: the nearest number, but vLLM's CPU kernel cuts the mantissa off (0.32).

    Found by trying: of the demo model, KL to the nearest is 4e-2, to what is cut off 9e-4.
    """
    value = (value / scale).clamp(-448, 448)
    if torch.version.cuda is None:
        step = 2 ** (value.abs().clamp(min=2**-6).log2().floor() - 3)
        return (value / step).trunc() * step * scale
    return value.to(torch.float8_e4m3fn).float() * scale


@contextmanager
def cached_in_fp8(model: PreTrainedModel, scales: list[tuple[float, float]]) -> Iterator[None]:
    """Keys, after the rotary embedding, and values are rounded as in an fp8 cache."""
    module, calls = sys.modules[type(model).__module__], iter([k for k, _ in scales] * 1000)
    rotate = module.apply_rotary_pos_emb

    def rotated(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        queries, keys = rotate(*args, **kwargs)
        return queries, fp8(keys, next(calls))

    values = [m for n, m in model.named_modules() if n.endswith(".v_proj")]
    hooks = [
        m.register_forward_hook(lambda _m, _i, out, scale=scale: fp8(out, scale))
        for m, (_, scale) in zip(values, scales, strict=False)
    ]
    module.apply_rotary_pos_emb = rotated if scales else rotate
    try:
        yield
    finally:
        module.apply_rotary_pos_emb = rotate
        for hook in hooks:
            hook.remove()


class Reference:
    """Hugging Face's log-probs in float32 of a dense directory."""

    def __init__(self, dense: Path, windows: Windows, biased: Path) -> None:
        """biased: a directory with the same biases, from which those are taken that Hugging Face does not declare."""
        how = {"experts_implementation": "eager"} if "num_local_experts" in (dense / "config.json").read_text() else {}
        model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32, attn_implementation="eager", **how)
        self.model: PreTrainedModel = model.eval()
        for name, value in biases_of(biased).items():
            model.get_submodule(name).bias = nn.Parameter(value.float(), requires_grad=False)
        self.windows, self.scales, self.static = windows, cache_of(biased), static_of(biased)
        self.biases = {
            name: value
            for name, value in model.named_parameters()
            if re.search(r"layers\.\d+\..*proj\.bias$", name) and value.any()
        }
        self.kinds = sorted({name.split(".")[-2] for name in self.biases})
        self.cache: dict[Any, Tensor] = {}

    @torch.inference_mode()
    def __call__(self, how: str | None, silent: tuple[str, ...] = ()) -> Tensor:
        """silent: kinds of linears whose biases are left out. how: rounding of activations."""
        if (how, silent) in self.cache:
            return self.cache[how, silent]
        gone = [value for name, value in self.biases.items() if name.split(".")[-2] in silent]
        kept = [bias.clone() for bias in gone]
        for bias in gone:
            bias.zero_()
        linears = {n: m for n, m in self.model.named_modules() if re.search(r"layers\.\d+\..*proj$", n)}
        hooks = [
            m.register_forward_pre_hook(partial(rounded, how, self.static.get(n))) for n, m in linears.items() if how
        ]
        with cached_in_fp8(self.model, self.scales):
            found = torch.cat([self.model(torch.tensor([w])).logits[0, :-1].log_softmax(-1) for w in self.windows])
        for hook in hooks:
            hook.remove()
        for bias, old in zip(gone, kept, strict=True):
            bias.copy_(old)
        self.cache[how, silent] = found
        return found
