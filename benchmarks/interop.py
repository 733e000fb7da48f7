"""Do other readers unpack our directories to our weights? Each in an environment of its own (`make interop`).

    python benchmarks/engine_exports.py OUT                              # with Tare
    python benchmarks/interop.py READER OUT [--out RESULTS.json]         # in the reader's environment

READER: autoawq (0.2.9), autogptq (0.7.1), gptqmodel (7.x), transformers (its own AWQ, GPTQ and compressed-tensors
loading). The reader loads the directory as its users do. A linear's weight is its `weight` where it is unpacked,
else what it computes of the unit vectors; its bias is what it computes of zeros. Both are held against
OUT/<model>-<scheme>/dense, our dequantized weights, in the reader's dtype: int4 symmetric weights are exact in float16,
others are rounded once. Imports nothing of Tare. The exit code is 0 when every weight and bias is equal.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", TRANSFORMERS_VERBOSITY="error", PYTHONWARNINGS="ignore")

import torch
from safetensors import safe_open
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
READERS: dict[str, tuple[str, tuple[str, ...]]] = {  # distribution, formats
    "autoawq": ("autoawq", ("awq",)),
    "autogptq": ("auto-gptq", ("gptq",)),
    "gptqmodel": ("gptqmodel", ("gptq", "awq")),
    "transformers": ("transformers", ("awq", "gptq", "compressed_tensors")),
}


def load(reader: str, folder: Path) -> nn.Module:
    """The model as the reader gives it, on the CPU."""
    if reader == "autoawq":
        import awq.models.base
        from awq import AutoAWQForCausalLM

        # on a CPU it insists on Intel's kernels, which were discontinued; its own arithmetic in PyTorch runs too
        awq.models.base.get_best_device = lambda: "cuda:0"
        return AutoAWQForCausalLM.from_quantized(str(folder), fuse_layers=False, device_map={"": "cpu"}).model
    if reader == "autogptq":
        from auto_gptq import AutoGPTQForCausalLM

        how = {"use_triton": False, "disable_exllama": True, "disable_exllamav2": True, "use_safetensors": True}
        return AutoGPTQForCausalLM.from_quantized(str(folder), device="cpu", **how).model
    if reader == "gptqmodel":
        from gptqmodel import BACKEND, GPTQModel

        backend = BACKEND.TORCH_AWQ if folder.name == "awq" and hasattr(BACKEND, "TORCH_AWQ") else BACKEND.TORCH
        return GPTQModel.load(str(folder), device="cpu", backend=backend).model
    from transformers import AutoModelForCausalLM

    # fp8 scales are float32, and are cast to the model's dtype before they multiply
    dtype = torch.float32 if "fp8" in folder.parent.name else torch.float16
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map="cpu")


def stored(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a directory."""
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as f:
            found |= {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118 - not a dict
    return found


@torch.inference_mode()
def seen(linear: nn.Module, columns: int) -> tuple[Tensor, Tensor]:
    """(weight, bias) of a linear, in the dtype in which it computes."""
    if type(linear) is nn.Linear and linear.weight.shape[1] == columns:
        return linear.weight.detach(), linear.bias.detach()
    floats = [p.dtype for p in [*linear.parameters(), *linear.buffers()] if p.dtype in (torch.float16, torch.bfloat16)]
    dtype = floats[0] if floats else torch.float32
    kept, linear.bias = getattr(linear, "bias", None), None
    weight = linear(torch.eye(columns, dtype=dtype)[None])[0].T
    linear.bias = kept
    bias = torch.zeros(len(weight), dtype=dtype) if kept is None else kept.detach()
    computed = linear(torch.zeros(1, 1, columns, dtype=dtype)).flatten()
    if not torch.equal(computed, bias):
        raise ValueError(f"of zeros the linear computes {computed[:3].tolist()}, its bias is {bias[:3].tolist()}")
    return weight, bias


def compare(reader: str, folder: Path) -> dict[str, Any]:
    """How many weights and biases of a directory are equal to ours."""
    try:
        model = load(reader, folder)
        model(torch.arange(4, 40)[None])  # some unpack at the first call
    # whatever another project's reader raises is this table's finding, so it is recorded; the run then ends with 1
    except (RuntimeError, ValueError, TypeError, ImportError, AttributeError, KeyError, NotImplementedError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    ours, worst, equal, biases = stored(folder.parent / "dense"), 0.0, 0, 0
    names = [n.removesuffix(".weight") for n in ours if "layers." in n and n.endswith("_proj.weight")]
    for name in names:
        weight, bias = seen(model.get_submodule(name), ours[f"{name}.weight"].shape[1])
        expected = ours[f"{name}.weight"].to(weight.dtype)
        equal += torch.equal(weight, expected)
        worst = max(worst, ((weight - expected).abs().max() / expected.abs().max()).item())
        biases += torch.equal(bias, ours[f"{name}.bias"].to(bias.dtype))
    kind = type(model.get_submodule(names[0])).__name__
    dtype = str(weight.dtype).removeprefix("torch.")
    return {
        "linear": kind,
        "dtype": dtype,
        "linears": len(names),
        "equal": equal,
        "biases_equal": biases,
        "largest_error": worst,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reader", choices=READERS)
    parser.add_argument("exports", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/interop.json")
    options = parser.parse_args()
    distribution, formats = READERS[options.reader]
    versions = {d: metadata.version(d) for d in dict.fromkeys((distribution, "transformers", "torch"))}
    rows = json.loads(options.out.read_text()) if options.out.exists() else []
    passed = True
    for folder in sorted(p for p in options.exports.glob("demo-*/*") if p.name in formats):
        if not (folder.parent / "dense").is_dir():
            continue
        name = f"{folder.parent.name}/{folder.name}"
        row = {"reader": options.reader, "name": name, "versions": versions} | compare(options.reader, folder)
        passed &= "error" not in row and row["equal"] == row["linears"] == row["biases_equal"]
        rows = [r for r in rows if (r["reader"], r["name"]) != (options.reader, name)] + [row]
        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        print({key: value for key, value in row.items() if key != "versions"}, flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
