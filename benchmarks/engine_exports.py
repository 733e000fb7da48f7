"""Directories for the engines to load: the demo model in every format, and a tiny random model of every architecture.

    python benchmarks/engine_exports.py OUT [only=demo]
    python benchmarks/engine_exports.py OUT model=SmolLM2-135M-Instruct.Q4_1.gguf text=MIX.txt     # a model of yours

Writes OUT/<model>-<scheme>/<format>/ with a `dense` one beside them, the reference. Codes are nearest on the largest
magnitude, biases are drawn at random on every slot that vLLM loads: what is compared is what the engine computes, not
how good it is. benchmarks/vllm_cpu.py and benchmarks/interop.py run them.

With model= (what `model.source` of a recipe takes) and text= (to calibrate and train on), that model alone goes through
recipes/smollm2_int4.yaml, with codes nearest and ten steps of training: real biases on every slot.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

import calibrate.observe
import export.stage
from export.carrier import trainable_biases
from qat.artifact import Artifact, derive
from qat.parent import Parent
from qat.quant import to_grid
from qat.recipe import load
from qat.scheme import Scheme
from qat.sections import Calibrate
from qat.train import run

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "recipes/demo"
FP8, INT8 = {"dtype": "fp8_e4m3"}, {"dtype": "int8"}
TOKEN = {"per": "token", "dynamic": True}
GROUPS = {"per": "group", "group_size": 128, "dynamic": True}
CACHE = {"dtype": "fp8_e4m3", "per": "tensor"}
INT4 = {"dtype": "int4", "group_size": 128}
SCHEMES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "int4": ({"weights": INT4}, ["awq", "gptq", "compressed_tensors", "dense"]),
    "int4-g32": ({"weights": INT4 | {"group_size": 32}}, ["awq", "gptq", "compressed_tensors", "dense"]),
    "int4-asym": ({"weights": INT4 | {"symmetric": False}}, ["awq", "compressed_tensors", "dense"]),
    "int4-kv8": ({"weights": INT4, "kv_cache": CACHE}, ["compressed_tensors"]),
    "int8": ({"weights": INT8 | {"group_size": 128}}, ["gptq", "compressed_tensors", "dense"]),
    "w8a8": ({"weights": INT8, "inputs": INT8 | TOKEN}, ["compressed_tensors", "dense"]),
    "fp8-channel": ({"weights": FP8, "inputs": FP8 | TOKEN}, ["compressed_tensors", "dense"]),
    "fp8-block": (
        {"weights": FP8 | {"per": "block"}, "inputs": FP8 | GROUPS},
        ["compressed_tensors", "modelopt", "dense"],
    ),
    "fp8-tensor": (
        {"weights": FP8 | {"per": "tensor"}, "inputs": FP8 | {"per": "tensor"}},
        ["compressed_tensors", "modelopt", "dense"],
    ),
}
SIZES: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "initializer_range": 0.06,
    "dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
MOE = {"num_experts_per_tok": 2}
FAMILIES: dict[str, PretrainedConfig] = {
    "qwen3": Qwen3Config(**SIZES),
    "gemma3": Gemma3TextConfig(**SIZES, sliding_window=64, layer_types=["sliding_attention", "full_attention"]),
    "phi3": Phi3Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}),
    "mixtral": MixtralConfig(**SIZES, **MOE, num_local_experts=4, sliding_window=None),
    "qwen3-moe": Qwen3MoeConfig(**SIZES, **MOE, num_experts=4, moe_intermediate_size=256, decoder_sparse_step=1),
}


def random_model(folder: Path, config: PretrainedConfig) -> Path:
    """A model with random weights and the demo's tokenizer."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO / "model").save_pretrained(folder)
    return folder


def make(
    parent_folder: Path,
    scheme: dict[str, Any],
    formats: list[str],
    out: Path,
    windows: torch.Tensor,
    engine: str = "vllm",
) -> None:
    """Calibrate, put random biases on every slot of the engine, export."""
    parent = Parent(parent_folder, parent_folder.name)
    methods = Calibrate.model_validate({"transform": "none", "range": "max", "round": "nearest", "inputs": "max"})
    chosen = {question: getattr(methods, question) for question in calibrate.observe.QUESTIONS}
    parsed, plain = Scheme.model_validate(scheme), out / "artifact"
    calibrate.observe.run(parent.config, parent.tensors, parsed, windows, chosen, parent_folder, plain)
    artifact, random = Artifact(plain), torch.Generator().manual_seed(0)
    slots, _ = trainable_biases(parent.arch, parent.config, [engine])
    biases = {}
    for linear in sorted(artifact.formats):
        if linear.removeprefix(parent.arch.blocks + ".").partition(".")[2] in slots:
            rows = artifact.get(f"{linear}.weight").shape[0]
            biases[f"{linear}.bias"] = to_grid(torch.randn(rows, generator=random) * 0.02)
    derive(plain, out / "biased", biases, {})
    export.stage.run(out / "biased", formats, [engine], 10**10, out)


def run_recipe(model: str, text: str, out: Path) -> None:
    """OUT/<model>-int4-g64/<format> of a model, by the whole pipeline but for the gate."""
    recipe = load(
        [
            "recipe=smollm2_int4.yaml", f"name={Path(model).stem}", f"output={out / 'runs'}", f"model.source={model}",
            f"data.calibration.source={text}", "data.calibration.sequences=16", "data.calibration.length=256",
            f"data.training.source={text}", "data.evaluation=null", "gate=null",
            "calibrate.round=nearest", "train.steps=10", "train.batch=2", "train.length=128",
        ]
    )  # fmt: skip
    if code := run(recipe):
        sys.exit(code)
    summary = json.loads((recipe.folder / "summary.json").read_text(encoding="utf-8"))
    for name, made in summary["exports"].items():
        shutil.copytree(recipe.folder / made["path"], out / f"{recipe.name}-int4-g64" / name, dirs_exist_ok=True)


def main() -> None:
    out, options = Path(sys.argv[1]), dict(word.split("=", 1) for word in sys.argv[2:])
    if "model" in options:
        run_recipe(options["model"], options["text"], out)
        return
    ids = AutoTokenizer.from_pretrained(DEMO / "model")(
        (DEMO / "text/calibration.txt").read_text(encoding="utf-8"), return_tensors="pt"
    )["input_ids"][0]
    windows = ids[: 16 * 128].view(16, 128)
    for name, (scheme, formats) in SCHEMES.items():
        if name != "int4-g32":
            make(DEMO / "model", scheme, formats, out / f"demo-{name}", windows)
            print(f"demo-{name}", flush=True)
    for family, config in FAMILIES.items() if options.get("only") != "demo" else ():
        parent = random_model(out / f"{family}-parent", config)
        for name in ("int4-g32", "fp8-channel"):
            make(parent, *SCHEMES[name], out / f"{family}-{name}", windows)
            print(f"{family}-{name}", flush=True)
        if family != "phi3":  # all its linears have slots
            scheme, formats = SCHEMES["int4-g32"]
            make(parent, scheme, formats[:-1], out / f"{family}-int4-g32-plugin", windows, "vllm_plugin")
        if hasattr(config, "num_local_experts"):  # experts left alone: no kernel for int4 ones on every CPU
            scheme, formats = scheme | {"skip": ["lm_head", "*experts*"]}, ["awq", "gptq", "dense"]
            make(parent, scheme, formats, out / f"{family}-attention", windows)
            make(parent, scheme, formats[:-1], out / f"{family}-attention-plugin", windows, "vllm_plugin")


if __name__ == "__main__":
    main()
