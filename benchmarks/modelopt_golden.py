"""NVIDIA's own directories against our reader, lint and packing. In two environments, as it pins transformers:

    python benchmarks/modelopt_golden.py make OUT     # with requirements/modelopt.txt: a tiny Llama in each algorithm
    python benchmarks/modelopt_golden.py check OUT    # with Tare

`check` lints each directory for TensorRT-LLM, exports a model of our own in the same algorithm and compares names,
dtypes and shapes of every tensor and the keys of hf_quant_config.json; packs Model-Optimizer's int4 codes again, which
must give its bytes; and, for fp8 per tensor and per channel, quantizes the original weights by the largest magnitude,
which must give its codes and scales.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import LlamaConfig, LlamaForCausalLM

RESULTS = Path(__file__).resolve().parent / "results/modelopt_golden.json"
ALGORITHMS = {  # name -> (Model-Optimizer's config, our scheme)
    "FP8": (
        "FP8_DEFAULT_CFG",
        {"weights": {"dtype": "fp8_e4m3", "per": "tensor"}, "inputs": {"dtype": "fp8_e4m3", "per": "tensor"}},
    ),
    "FP8_PER_CHANNEL_PER_TOKEN": (
        "FP8_PER_CHANNEL_PER_TOKEN_CFG",
        {"weights": {"dtype": "fp8_e4m3"}, "inputs": {"dtype": "fp8_e4m3", "per": "token", "dynamic": True}},
    ),
    "FP8_PB_WO": (
        "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
        {
            "weights": {"dtype": "fp8_e4m3", "per": "block"},
            "inputs": {"dtype": "fp8_e4m3", "per": "group", "group_size": 128, "dynamic": True},
        },
    ),
    "W4A16_AWQ": ("INT4_AWQ_CFG", {"weights": {"group_size": 128}}),
    "W4A8_AWQ": (
        "W4A8_AWQ_BETA_CFG",
        {"weights": {"group_size": 128}, "inputs": {"dtype": "fp8_e4m3", "per": "tensor"}},
    ),
}  # fmt: skip
SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "attention_bias": True, "mlp_bias": True,
    "architectures": ["LlamaForCausalLM"],
}  # fmt: skip


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    made = LlamaForCausalLM(LlamaConfig(**SIZES))
    for name, value in made.named_parameters():
        if name.endswith("bias"):
            value.data.normal_()
    return made.bfloat16()


def make(out: Path) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    model().save_pretrained(out / "parent")
    ids = torch.randint(128, (4, 32), generator=torch.Generator().manual_seed(0))
    for name, (config, _) in ALGORITHMS.items():
        quantized = mtq.quantize(model(), getattr(mtq, config), lambda m: m(ids))
        export_hf_checkpoint(quantized, export_dir=str(out / name))
        print(f"made {name}", flush=True)


def check(out: Path) -> int:
    import calibrate.observe
    from export import _pack
    from export.stage import run
    from gate import lint
    from gate.readers import open_export
    from gate.readers._headers import read_header, weight_files
    from qat.artifact import Artifact, derive
    from qat.parent import Parent
    from qat.quant import max_scale, quantize
    from qat.scheme import Scheme
    from qat.sections import Calibrate

    def headers(folder: Path) -> dict[str, Any]:
        return {n: (e.dtype, e.shape) for file in weight_files(folder) for n, e in read_header(folder / file).items()}

    parent, bad, rows = Parent(out / "parent", "tiny"), 0, []
    methods = Calibrate.model_validate({"transform": "none", "range": "max", "round": "nearest", "inputs": "max"})
    chosen = {question: getattr(methods, question) for question in calibrate.observe.QUESTIONS}
    ids = torch.randint(128, (4, 32), generator=torch.Generator().manual_seed(0))
    for name, (_, scheme) in ALGORITHMS.items():
        found = lint.check(out / name, ["trtllm"])
        faults = [str(fault) for fault in found if not lint.is_note(fault)]
        notes = [str(fault) for fault in found if lint.is_note(fault)]
        theirs = open_export(out / name)
        with tempfile.TemporaryDirectory() as folder:
            plain = Path(folder) / "plain"
            parsed = Scheme.model_validate(scheme)
            calibrate.observe.run(parent.config, parent.tensors, parsed, ids, chosen, parent.folder, plain)
            derive(plain, Path(folder) / "artifact", {}, {})
            run(Path(folder) / "artifact", ["modelopt"], ["trtllm"], 10**9, Path(folder))
            ours, artifact = Path(folder) / "modelopt", Artifact(plain)
            differ = {n: (headers(ours).get(n), h) for n, h in headers(out / name).items() if headers(ours).get(n) != h}
            differ |= {n: (h, None) for n, h in headers(ours).items() if n not in headers(out / name)}
            keys = [
                set(json.loads((p / "hf_quant_config.json").read_text())["quantization"]) for p in (ours, out / name)
            ]
            codes = {}
            for linear in theirs.linears:
                if name.startswith("W4A"):
                    codes[linear] = torch.equal(_pack.modelopt(theirs.codes(linear)), theirs.raw(f"{linear}.weight"))
                elif name != "FP8_PB_WO":
                    weight, fmt = parent.tensors.get(f"{linear}.weight").float(), artifact.formats[linear]
                    largest = (
                        weight.abs().amax(1, keepdim=True) if fmt.per == "channel" else weight.abs().max().view(1, 1)
                    )
                    scale = max_scale(largest, fmt)  # each linear's own: it does not share them where engines fuse
                    if fmt.per == "tensor":  # it divides in bfloat16: 1 to 4% of codes are the next ones
                        mine = (weight.bfloat16() / scale.view(())).to(torch.float8_e4m3fn)
                    else:
                        mine = quantize(weight, scale, None, fmt)
                    codes[linear] = torch.equal(scale, theirs.scale(linear)) and torch.equal(
                        mine.float(), theirs.codes(linear).float()
                    )
        row = {
            "algorithm": name,
            "faults": faults[:2], "notes": notes[:1], 
            "headers_that_differ": {n: differ[n] for n in list(differ)[:3]},
            "tensors": len(headers(out / name)), "keys_only_in_one": sorted(keys[0] ^ keys[1]),
            "linears_equal": f"{sum(codes.values())} of {len(codes)}" if codes else "not compared",
        }  # fmt: skip
        bad += bool(faults) + bool(differ) + (not all(codes.values()))
        print(json.dumps(row), flush=True)
        rows.append(row)
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(make(Path(sys.argv[2])) if sys.argv[1] == "make" else check(Path(sys.argv[2])))
