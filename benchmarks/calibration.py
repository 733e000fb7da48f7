"""Calibration against llm-compressor in one run: time, memory and what is lost, INT4 with symmetric groups of 64.

    python benchmarks/calibration.py llmc=ENV/bin/python model=FOLDER_OR_GGUF calibration=TEXT evaluation=TEXT
        [method=gptq] [dtype=float32] [windows=32] [length=512] [batch=8] [group_size=64] [threads=2] [device=cpu]
        [repeats=3] [blocks=ALL] [held_out=24] [range=max] [work=FOLDER] [out=benchmarks/results/calibration.json]

The tools take turns, each in a fresh process, `repeats` times. llm-compressor runs in an environment of its own
(requirements/llm-compressor.txt) that this same file is run with; leave llmc out to time Tare alone. What is given for
both is the same: model folder, token windows, threads. `blocks` keeps the first ones only, for a quick try.
`model=random:LAYERS` makes a Llama-3-8B of that many layers with random weights on the spot: its perplexity means
nothing and is left out, its times are those of a real one.

seconds           calibration: from the loaded model and tokens to quantized weights; Tare's reads the parent from disk
                  block by block and writes the artifact within it, llm-compressor's model is in memory before and after
process_seconds   the whole process: imports, loading and saving as well
solver_seconds    in the rounding itself: the column loop with its factorisation (and with Tare, the search for scales)
peak_rss_gb       of the process (VmHWM). peak_gpu_gb: allocated by torch
ppl, kl           of the result on held-out windows, both read and measured by the gate's code; Tare's through its
                  compressed-tensors export

seconds are medians; the rest belongs to the median run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median_low
from typing import Any

from _options import read

START = time.perf_counter()
ROOT = Path(__file__).resolve().parent.parent
DEFAULTS = {
    "llmc": "", "model": "", "calibration": "", "evaluation": "", "method": "gptq", "dtype": "float32", "windows": "32",
    "length": "512", "batch": "8", "group_size": "64", "threads": "2", "device": "cpu", "repeats": "3", "blocks": "",
    "held_out": "24", "range": "max", "work": "", "out": str(ROOT / "benchmarks/results/calibration.json"),
}  # fmt: skip
TOOLS = ("llm-compressor", "tare")
RESULT = "result.json"


def main(argv: list[str]) -> None:
    options = read(argv, DEFAULTS)
    needed = ("model",) if options["model"].startswith("random:") else ("model", "calibration", "evaluation")
    if missing := [name for name in needed if not options[name]]:
        raise SystemExit(f"{', '.join(missing)} must be given; see the top of {Path(__file__).name}")
    with tempfile.TemporaryDirectory(dir=options["work"] or None) as folder:
        compare(options, Path(folder))


def compare(options: dict[str, str], work: Path) -> None:
    """Prepare, time the tools in turn, measure what came out, record."""
    sys.path[:1] = [str(ROOT), str(ROOT / "benchmarks")]
    import calibration_inputs as made

    model, name = made.prepare(options, work)
    job = {**options, "model": str(model), "tokens": str(work / made.TOKENS)}
    tools = [tool for tool in TOOLS if tool == "tare" or options["llmc"]]
    runs: dict[str, list[dict[str, Any]]] = {tool: [] for tool in tools}
    for number in range(int(options["repeats"])):
        for tool in tools:
            found = once(tool, {**job, "target": str(work / f"{tool}-{number}")})
            runs[tool].append(found)
            print(f"{tool:15} {number}: {json.dumps(found)}", flush=True)
    rows = []
    for tool, every in runs.items():
        middle = median_low(run["seconds"] for run in every)
        rows.append(next(run for run in every if run["seconds"] == middle) | {"tool": tool, "repeats": len(every)})
    if not options["model"].startswith("random:"):
        made.measure(options, model, rows, work)
    shared = {
        "machine": made.machine(options["device"]),
        "model": name,
        "scheme": f"int4-g{options['group_size']}-sym",
        "method": options["method"],
        "dtype": options["dtype"],
        "tokens": int(options["windows"]) * int(options["length"]),
        "threads": int(options["threads"]),
        "blocks": int(options["blocks"]) if options["blocks"] else None,
    }
    path = Path(options["out"])
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    rows = [shared | {key: value for key, value in row.items() if key != "target"} for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(kept + rows, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(json.dumps(row), flush=True)


def once(tool: str, job: dict[str, str]) -> dict[str, Any]:
    """One tool in a process of its own; what it says of itself, and the wall time of the process."""
    target = Path(job["target"])
    target.mkdir()
    python = sys.executable if tool == "tare" else job["llmc"]
    # threads that wait sleep: both tools are measured with the same settings
    environment = os.environ | {"OMP_NUM_THREADS": job["threads"], "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    command = [python, str(Path(__file__).resolve()), "worker", tool, json.dumps(job)]
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{tool} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found = json.loads((target / RESULT).read_text(encoding="utf-8"))
    return {**found, "process_seconds": round(seconds, 2), "target": str(target)}


def worker(tool: str, job: dict[str, str]) -> None:
    """In the tool's own process: calibrate, save, say what it took."""
    import torch

    torch.set_num_threads(int(job["threads"]))
    found = (tare if tool == "tare" else llm_compressor)(job)
    # not getrusage: its maximum comes with the process that started this one
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    found["peak_rss_gb"] = round(int(status.split("VmHWM:")[1].split()[0]) / 2**20, 3)
    found["peak_gpu_gb"] = round(torch.cuda.max_memory_allocated() / 2**30, 3) if job["device"] != "cpu" else None
    (Path(job["target"]) / RESULT).write_text(json.dumps(found), encoding="utf-8")


def tare(job: dict[str, str]) -> dict[str, Any]:
    sys.path[0] = str(ROOT)
    import torch
    from safetensors.torch import load_file

    from calibrate import observe
    from export.stage import run as export
    from qat import __version__
    from qat.parent import Parent
    from qat.recipe import Recipe
    from qat.scheme import Scheme

    answers = {
        "rtn": {"range": "max", "round": "nearest"},
        # a range that does not look at the inputs is refitted while rounding
        "gptq": {"range": "max", "round": {"name": "gptq", "refit": True, "damping": 0.1}}
        if job["range"] == "max"
        else {"range": job["range"], "round": "gptq"},
        "awq": {"transform": "awq", "range": "activation", "round": "nearest"},
    }[job["method"]]
    section = Recipe.model_fields["calibrate"].annotation
    assert section is not None
    chosen = section.model_validate(answers)
    folder, out = Path(job["model"]), Path(job["target"]) / "artifact"
    parent = Parent(folder, folder.name)
    scheme = Scheme.model_validate({"weights": {"dtype": "int4", "group_size": int(job["group_size"])}})
    windows = load_file(job["tokens"])["windows"]
    config, tensors = parent.config, parent.tensors
    start = time.perf_counter()
    metrics = observe.run(
        config,
        tensors,
        scheme,
        windows,
        {question: getattr(chosen, question) for question in observe.QUESTIONS},
        folder,
        out,
        device=job["device"],
        dtype=getattr(torch, job["dtype"]),
        batch=int(job["batch"]),
    )
    seconds = time.perf_counter() - start
    export(out, ["compressed_tensors"], ["vllm"], int(5e9), Path(job["target"]))
    return {
        "seconds": round(seconds, 2),
        "solver_seconds": metrics["seconds"].get("round"),
        "parts": metrics["seconds"],
        "version": __version__,
    }


def llm_compressor(job: dict[str, str]) -> dict[str, Any]:
    from llmcompressor.modifiers.gptq import base as solver
    from rivals import llm_compressor as loaded  # beside this file
    from safetensors.torch import load_file

    spent = [0.0]
    inner = solver.quantize_weight

    def timed(*args: Any, **kwargs: Any) -> Any:
        synchronize(job["device"])
        start = time.perf_counter()
        out = inner(*args, **kwargs)
        synchronize(job["device"])
        spent[0] += time.perf_counter() - start
        return out

    solver.quantize_weight = timed
    quantize, version = loaded(job, load_file(job["tokens"])["windows"])
    start = time.perf_counter()
    save = quantize()
    seconds = time.perf_counter() - start
    save(str(Path(job["target"]) / "compressed_tensors"))
    return {
        "seconds": round(seconds, 2),
        "solver_seconds": round(spent[0], 3) if spent[0] else None,
        "version": version,
    }


def synchronize(device: str) -> None:
    if device != "cpu":
        import torch

        torch.cuda.synchronize()


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2], json.loads(sys.argv[3]))
    else:
        main(sys.argv[1:])
