"""Training on one GPU, on two (DDP), and on two that share the frozen weights (FSDP2): loss curves and speed.

    python benchmarks/ranks.py [recipe=demo.yaml] [model=demo|random:LAYERS] [steps=100] [batch=8] [length=256]
        [launch='1 1gpu.yaml;2 2gpus.yaml;2 8gpus_sharded.yaml'] (ranks, and a file of recipes/accelerate or a path)
        [work=FOLDER] [out=benchmarks/results/ranks.json]

Each is a run of the real command, `accelerate launch --config_file ... qat/train.py`, of the recipe's training without
a gate (two steps at least), in a folder of its own; all train on one artifact, which the first rounds to nearest.
A curve's distance is the largest |loss - loss of the first launch| / that loss over all steps, and that of the KL on
held-out windows after the last step. efficiency: the first launch's seconds per step / (ranks x this one's).
`random:LAYERS` is a Llama-3-8B of that many layers with random weights, for speed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from _options import read

from qat.manifest import read_json

DEFAULTS = {
    "recipe": "demo.yaml", "model": "demo", "steps": "100", "batch": "8", "length": "256", "work": "",
    "launch": "1 1gpu.yaml;2 2gpus.yaml;2 8gpus_sharded.yaml",
    "out": "benchmarks/results/ranks.json",
}  # fmt: skip
FIXED = [
    "name=ranks", "variants={}", "gate=null", "calibrate.transform=none", "calibrate.range=max",
    "calibrate.round=nearest", "data.evaluation=null", "export.formats=[dense]",
]  # fmt: skip


def main(argv: list[str]) -> None:
    options = read(argv, DEFAULTS)
    for launch in options["launch"].split(";"):
        ranks, _, config = launch.partition(" ")
        if not (ranks.isdigit() and Path("recipes/accelerate", config).is_file()):
            raise SystemExit(f"launch={launch!r} is not RANKS FILE, with a file of recipes/accelerate or a path")
    if not (options["steps"].isdigit() and int(options["steps"]) > 1):
        raise SystemExit(f"steps={options['steps']}: at least 2, as seconds are from one step to the next")
    with tempfile.TemporaryDirectory(dir=options["work"] or None) as folder:
        compare(options, Path(folder))


def compare(options: dict[str, str], work: Path) -> None:
    model = options["model"]
    if model.startswith("random:"):
        import calibration_inputs as made

        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = str(made.random_llama(int(model.partition(":")[2]), work / "model", device))
    path = Path(options["out"])
    results: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    first: dict[str, Any] | None = None
    for number, launch in enumerate(options["launch"].split(";")):
        ranks, _, config = launch.partition(" ")
        output = work / str(number)
        if first is not None:
            shutil.copytree(work / "calibrated", output)
        found = once(int(ranks), config, output, options, model)
        if first is None:
            first = found
            shutil.copytree(output, work / "calibrated")
            for stage in (work / "calibrated/ranks").iterdir():
                if stage.name.startswith(("train-", "export-")):
                    shutil.rmtree(stage)
        apart = max(abs(a - b) / b for a, b in zip(found["loss"], first["loss"], strict=True))
        row = {
            "model": options["model"],
            "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "launch": Path(config).name,
            "ranks": int(ranks),
            "steps": int(options["steps"]),
            "tokens_per_step": int(options["batch"]) * int(options["length"]),
            "seconds_per_step": found["seconds_per_step"],
            "efficiency": first["seconds_per_step"] / (int(ranks) * found["seconds_per_step"]),
            "curve_apart": apart,
            "kl_end": found["kl_end"],
            "kl_apart": abs(found["kl_end"] - first["kl_end"]) / first["kl_end"],
            "cuda_graph": found["cuda_graph"],
            "peak_gpu_gb": found["peak_gpu_gb"],
        }
        print(json.dumps(row), flush=True)
        results.append(row)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def once(ranks: int, config: str, output: Path, options: dict[str, str], model: str) -> dict[str, Any]:
    """The metrics of the training stage of one launch."""
    file = Path("recipes/accelerate", config)  # of a whole path, that path
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
    command = [
        *launcher,
        f"--num_processes={ranks}",
        "qat/train.py",
        f"recipe={options['recipe']}",
        f"model.source={model}",
        f"output={output}",
        *(f"train.{key}={options[key]}" for key in ("steps", "batch", "length")),
        *FIXED,
    ]
    done = subprocess.run(command, env=os.environ | {"OMP_WAIT_POLICY": "passive"}, capture_output=True, text=True)
    summary = output / "ranks/summary.json"
    if done.returncode:  # the launcher's own traceback comes last, and is long
        why = read_json(summary).get("error") if summary.is_file() else None
        raise SystemExit(f"{(done.stdout + done.stderr)[-8000:]}\n{config} ended with {done.returncode}: {why}")
    stages = read_json(summary)["stages"]
    train = next(stage for stage in stages if stage["name"] == "train")
    if (there := train["metrics"]["ranks"]) != ranks:
        raise SystemExit(f"{config} started {there} ranks, not {ranks}")
    return train["metrics"] | {"peak_gpu_gb": train["peak_gpu_gb"]}


if __name__ == "__main__":
    main(sys.argv[1:])
