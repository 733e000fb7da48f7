"""What other tools recover of the INT4 loss: parent, token windows, scheme and evaluation of benchmarks/recovery.py.

    python benchmarks/rivals.py model=FOLDER_OR_GGUF calibration=TEXT evaluation=TEXT \\
        llm-compressor=ENV/bin/python auto-round=ENV/bin/python [modelopt=...] [gptqmodel=...] \\
        [only=llm-compressor/gptq,...] [windows=256] [length=512] [batch=8] [group_size=64] [iterations=200] \\
        [held_out=300] [held_length=1024] [dtype=bfloat16] [device=cuda] [threads=16] [work=FOLDER] \\
        [out=benchmarks/results/recovery.json]

Each tool runs in an environment of its own (requirements/) with the settings its own documentation proposes, in a fresh
process, and writes a directory in its own format; `seconds` is from the loaded model to quantized weights, peak_gb what
torch allocated. Perplexity, KL and top-1 agreement are the gate's, read back from that directory. A tool whose
interpreter is not given is left out; one that fails is said so, and the others go on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _options import read

ROOT = Path(__file__).resolve().parent.parent
DEFAULTS = {
    "model": "", "calibration": "", "evaluation": "", "only": "", "windows": "256", "length": "512", "batch": "8",
    "group_size": "64", "iterations": "200", "held_out": "300", "held_length": "1024", "dtype": "bfloat16",
    "device": "cuda", "threads": "16", "work": "", "out": str(ROOT / "benchmarks/results/recovery.json"),
}  # fmt: skip
METHODS = {
    "llm-compressor": ("rtn", "gptq", "awq"),
    "auto-round": ("round",),
    "modelopt": ("awq",),
    "gptqmodel": ("gptq",),
}
MADE, RESULT = "made", "result.json"


def main(argv: list[str]) -> None:
    options = read(argv, DEFAULTS, METHODS)
    if missing := [name for name in ("model", "calibration", "evaluation") if not options[name]]:
        raise SystemExit(f"{', '.join(missing)} must be given; see the top of {Path(__file__).name}")
    every = [f"{tool}/{method}" for tool, methods in METHODS.items() if tool in options for method in methods]
    chosen = options["only"].split(",") if options["only"] else every
    if strange := sorted(set(chosen) - set(every)):
        raise SystemExit(f"only={','.join(strange)}: not among {', '.join(every) or 'any tool whose python is given'}")
    with tempfile.TemporaryDirectory(dir=options["work"] or None) as folder:
        compare(options, chosen, Path(folder))


def compare(options: dict[str, str], chosen: list[str], work: Path) -> None:
    """Run the tools one after the other, measure what each wrote, and add its row."""
    sys.path[:1] = [str(ROOT), str(ROOT / "benchmarks")]
    import calibration_inputs as made
    import torch

    import gate.stage
    from qat.parent import Parent
    from qat.scheme import Scheme
    from qat.sections import Text
    from qat.tokens import windows

    model, name = made.prepare(options | {"blocks": ""}, work)
    tokenizer = Parent(model, model.name).tokenizer
    text = Text(source=options["evaluation"])
    held = windows(tokenizer, text, int(options["held_length"]), int(options["held_out"]))
    scheme = Scheme.model_validate({"weights": {"dtype": "int4", "group_size": int(options["group_size"])}})
    cache = work / "measured"
    cache.mkdir()
    path = Path(options["out"])
    results: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    for number, one in enumerate(chosen):
        tool, _, method = one.partition("/")
        target = work / str(number)
        try:
            found = once(tool, options | {"model": str(model), "method": method, "target": str(target),
                                          "tokens": str(work / made.TOKENS)})  # fmt: skip
        except RuntimeError as error:
            print(f"{one} FAILED: {error}", flush=True)
            continue
        states = [gate.stage.plain_state(one, target / MADE)]
        measured = gate.stage.measure_all(
            gate.stage.plain_state("parent", model),
            states,
            held.windows,
            cache,
            torch.device(options["device"]),
            getattr(torch, options["dtype"]),
        )["states"][one]
        row = {
            "model": name,
            "scheme": f"{scheme}-sym",
            "tool": tool,
            "machine": torch.cuda.get_device_name() if options["device"] == "cuda" else "cpu",
            "evaluation": {"num_windows": len(held.windows), "length": held.windows.shape[1]},
            "method": method,
            "seed": None,
            "ppl": measured["perplexity"],
            "kl": measured["kl"],
            "top1": measured["top1"],
            "source": "export",
            **found,
        }
        print(json.dumps(row), flush=True)
        results.append(row)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def once(tool: str, job: dict[str, str]) -> dict[str, Any]:
    """One tool in a process of its own. Raises RuntimeError with the end of its output when it fails."""
    target = Path(job["target"])
    target.mkdir()
    environment = os.environ | {"OMP_NUM_THREADS": job["threads"], "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    command = [job[tool], str(Path(__file__).resolve()), "worker", tool, json.dumps(job)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}")
    found: dict[str, Any] = json.loads((target / RESULT).read_text(encoding="utf-8"))
    return found


def worker(tool: str, job: dict[str, str]) -> None:
    """In the tool's own process: quantize, save, say what it took."""
    import torch
    from safetensors.torch import load_file

    torch.set_num_threads(int(job["threads"]))
    windows = load_file(job["tokens"])["windows"]
    quantize, version = TOOLS[tool](job, windows)  # the model is loaded
    start = time.perf_counter()
    save = quantize()
    if job["device"] == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    save(str(Path(job["target"]) / MADE))
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    found = {
        "seconds": round(seconds, 1),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 3) if job["device"] == "cuda" else None,
        "peak_rss_gb": round(int(status.split("VmHWM:")[1].split()[0]) / 1e6, 3),
        "version": version,
    }
    (Path(job["target"]) / RESULT).write_text(json.dumps(found), encoding="utf-8")


Loaded = tuple[Callable[[], Callable[[str], Any]], str]


def hub_model(job: dict[str, str]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"]))


def llm_compressor(job: dict[str, str], windows: Any) -> Loaded:
    import llmcompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    weights = QuantizationArgs(
        num_bits=4, type="int", symmetric=True, strategy="group", group_size=int(job["group_size"])
    )
    groups = {"all": QuantizationScheme(targets=["Linear"], weights=weights)}
    plain = QuantizationModifier(config_groups=groups, ignore=["lm_head"])
    recipe: Any = {
        "rtn": plain,
        "gptq": GPTQModifier(config_groups=groups, ignore=["lm_head"]),
        "awq": [AWQModifier(), plain],
    }[job["method"]]
    rows = windows.tolist()
    data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
    model = hub_model(job)

    def quantize() -> Callable[[str], Any]:
        oneshot(
            model=model,
            dataset=data,
            recipe=recipe,
            num_calibration_samples=len(rows),
            max_seq_length=len(rows[0]),
            shuffle_calibration_samples=False,
            batch_size=int(job["batch"]),
            pipeline="datafree" if job["method"] == "rtn" else "sequential",
        )
        return lambda out: model.save_pretrained(out, save_compressed=True)

    return quantize, llmcompressor.__version__


def auto_round(job: dict[str, str], windows: Any) -> Loaded:
    import auto_round
    from transformers import AutoTokenizer

    made = auto_round.AutoRound(
        hub_model(job),
        AutoTokenizer.from_pretrained(job["model"]),
        bits=4,
        group_size=int(job["group_size"]),
        sym=True,
        iters=int(job["iterations"]),
        dataset=list(windows.split(int(job["batch"]))),
        seqlen=windows.shape[1],
        nsamples=len(windows),
        batch_size=int(job["batch"]),
        device_map=0 if job["device"] == "cuda" else "cpu",
    )

    def quantize() -> Callable[[str], Any]:
        made.quantize()
        return lambda out: made.save_quantized(out, format="auto_gptq")

    return quantize, auto_round.__version__


def modelopt(job: dict[str, str], windows: Any) -> Loaded:
    import copy

    import modelopt
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint

    config = copy.deepcopy(mtq.INT4_AWQ_CFG)
    with_groups(config, int(job["group_size"]))
    model = hub_model(job).to(job["device"])

    def quantize() -> Callable[[str], Any]:
        def forward(m: Any) -> None:
            with torch.no_grad():
                for part in windows.split(int(job["batch"])):
                    m(part.to(job["device"]))

        made = mtq.quantize(model, config, forward)
        return lambda out: export_hf_checkpoint(made, export_dir=out)

    return quantize, modelopt.__version__


def with_groups(config: Any, group_size: int) -> None:
    """Set the size of blocks along the last axis in a configuration of Model-Optimizer, wherever it stands."""
    if isinstance(config, dict) and -1 in (config.get("block_sizes") or {}):
        config["block_sizes"][-1] = group_size
    for value in config.values() if isinstance(config, dict) else config:
        if isinstance(value, dict | list):
            with_groups(value, group_size)


def gptqmodel(job: dict[str, str], windows: Any) -> Loaded:
    import gptqmodel as package
    from gptqmodel import GPTQModel, QuantizeConfig

    config = QuantizeConfig(bits=4, group_size=int(job["group_size"]), sym=True, desc_act=False)
    model = GPTQModel.load(job["model"], config, device=job["device"])
    rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in windows.tolist()]

    def quantize() -> Callable[[str], Any]:
        model.quantize(rows, batch_size=int(job["batch"]))
        return lambda out: model.save(out)

    return quantize, package.__version__


TOOLS: dict[str, Callable[[dict[str, str], Any], Loaded]] = {
    "llm-compressor": llm_compressor,
    "auto-round": auto_round,
    "modelopt": modelopt,
    "gptqmodel": gptqmodel,
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2], json.loads(sys.argv[3]))
    else:
        main(sys.argv[1:])
