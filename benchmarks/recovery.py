"""How much of the INT4 loss is recovered: one pipeline run per method and seed, numbers of the exported directory.

    python benchmarks/recovery.py recipe=smollm2_int4.yaml model.source=... data.evaluation.source=... \\
        [methods=range,gptq,learned,bias,bias+scale,default] [seeds=0,1,2] [out=benchmarks/results/recovery.json]

Other arguments are those of the recipe. Results are added to the JSON list after every run; a run whose method is not
trained has one seed. All methods of a call share the run's folder, so that what they have in common is done once.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in qat/train.py; read when torch loads

import torch

from qat.recipe import load
from qat.train import run

ACTIVATION = ["calibrate.transform=none", "calibrate.range=activation"]
NEAREST, UNTRAINED = [*ACTIVATION, "calibrate.round=nearest"], ["train=null"]
ALONE = "train.loss={kl: 1.0}"
BOTH = ["train.learn={bias: 3.0e-3, scale: 3.0e-3}", ALONE]
METHODS = {
    "range": NEAREST + UNTRAINED,
    "kl": ["calibrate.transform=none", "calibrate.range=kl", "calibrate.round=nearest", *UNTRAINED],
    "awq": ["calibrate.transform=awq", "calibrate.range=activation", "calibrate.round=nearest", *UNTRAINED],
    "gptq": [*ACTIVATION, "calibrate.round=gptq", *UNTRAINED],
    "awq+gptq": ["calibrate.transform=awq", "calibrate.range=activation", "calibrate.round=gptq", *UNTRAINED],
    "learned": [*ACTIVATION, "calibrate.round=learned", *UNTRAINED],
    "bias": [*NEAREST, "train.learn={bias: 1.0e-2}", ALONE],
    "bias+scale": [*NEAREST, *BOTH],
    "gptq+bias+scale": [*ACTIVATION, "calibrate.round=gptq", *BOTH],
    "learned+bias+scale": [*ACTIVATION, "calibrate.round=learned", *BOTH],
    "default": [],
}


def once(arguments: list[str], method: str, seed: int) -> list[dict[str, Any]]:
    """Run the pipeline; returns the JSON objects of the parent, of round-to-nearest and of the export."""
    trained = "train=null" not in METHODS[method]
    recipe = load([*arguments, *METHODS[method], *([f"train.seed={seed}"] if trained else [])])
    start = time.perf_counter()
    code = run(recipe)
    assert code in (0, 3, 4), f"the run ended with {code}"
    verdict = json.loads((recipe.folder / "verdict.json").read_text(encoding="utf-8"))
    summary = json.loads((recipe.folder / "summary.json").read_text(encoding="utf-8"))
    stages = {stage["name"]: stage for stage in summary["stages"]}
    rows = {row["state"]: row for row in verdict["table"]}
    shared = {
        "model": Path(recipe.model.source).stem,
        "scheme": str(recipe.scheme) + ("-sym" if recipe.scheme.weights.symmetric else ""),
        "tool": "tare",
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "evaluation": verdict["evaluation"],
    }
    made = [stages[name] for name in ("calibrate", "train") if name in stages]
    export = {
        "method": method,
        "calibrate": {question: choice["name"] for question, choice in recipe.model_dump()["calibrate"].items()},
        "learn": recipe.model_dump()["train"]["learn"] if recipe.train else None,
        "loss": recipe.train.loss if recipe.train else None,
        "seed": seed if trained else None,
        **numbers(rows[recipe.export.formats[0]]),
        "tasks": tasks(verdict["states"][recipe.export.formats[0]]),
        "source": "export",
        "seconds": round(sum(stage["seconds"] for stage in made), 1),
        "seconds_by_stage": {stage["name"]: stage["seconds"] for stage in made},
        "gate_seconds": stages["gate"]["seconds"],
        "peak_gb": max((stage["peak_gpu_gb"] or 0 for stage in made), default=None),
        "peak_rss_gb": max(stage["peak_rss_gb"] for stage in made),
    }
    if trained:
        export["validation_kl"] = stages["train"]["metrics"]["kl_end"]
    print(f"{method} seed {seed}: {json.dumps(export)} wall {time.perf_counter() - start:.1f} s", flush=True)
    return [
        {
            **shared,
            "method": "bf16",
            "seed": None,
            **numbers(rows["parent"]),
            "tasks": tasks(verdict["states"]["parent"]),
            "source": "parent",
        },
        {**shared, "method": "rtn", "seed": None, **numbers(rows["rtn"]), "source": "parent, rounded when read"},
        {**shared, **export},
    ]


def numbers(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "ppl": row["perplexity"],
        "kl": row["kl"],
        "top1": row["top1"],
        "ppl_recovered": row["perplexity_recovered"],
        "kl_recovered": row["kl_recovered"],
    }


def tasks(state: dict[str, Any]) -> dict[str, list[float]]:
    """Score and standard error of each task of `gate.tasks`, where the recipe has any."""
    found = state.get("tasks", {})
    return {
        name: [task["score"], statistics.stdev(task["scores"]) / len(task["scores"]) ** 0.5]
        for name, task in found.items()
    }


def main(argv: list[str]) -> None:
    own = dict(a.split("=", 1) for a in argv if a.split("=")[0] in ("methods", "seeds", "out"))
    arguments = [a for a in argv if a.split("=")[0] not in own]
    seeds = [int(seed) for seed in own.get("seeds", "0,1,2").split(",")]
    path = Path(own.get("out", "benchmarks/results/recovery.json"))
    results: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    for method in own.get("methods", "bias,bias+scale").split(","):
        for seed in seeds if "train=null" not in METHODS[method] else seeds[:1]:
            results += [row for row in once(arguments, method, seed) if row not in results]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
