"""How much of the INT4 loss is recovered: one pipeline run per method and seed, numbers of the exported directory.

    python benchmarks/recovery.py recipe=smollm2_int4.yaml model.source=... data.evaluation.source=... \\
        [methods=bias,bias+scale] [seeds=0,1,2] [out=benchmarks/results/recovery.json]

Other arguments are those of the recipe. Results are added to the JSON list after every run. `tuned:METHOD` first picks
the rates by the KL on held-out windows of the *training* text (never the evaluation text), on the first seed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in qat/train.py; read when torch loads

import torch

from qat.recipe import load
from qat.train import run

METHODS = {
    "bias": {"bias": 1e-2},
    "bias+scale": {"bias": 3e-3, "scale": 3e-3},
    "scale": {"scale": 3e-3},
}
CANDIDATES = ({"bias": 1e-3, "scale": 3e-3}, {"bias": 3e-3, "scale": 5e-3})


def once(arguments: list[str], learn: dict[str, float], seed: int) -> dict[str, Any]:
    """Run the pipeline; returns the rows of the table by state, and the training stage's line of summary.json."""
    recipe = load([*arguments, f"train.learn={json.dumps(learn)}", f"train.seed={seed}"])
    start = time.perf_counter()
    code = run(recipe)
    assert code in (0, 3), f"the run ended with {code}"
    verdict = json.loads((recipe.folder / "verdict.json").read_text(encoding="utf-8"))
    summary = json.loads((recipe.folder / "summary.json").read_text(encoding="utf-8"))
    train = next(stage for stage in summary["stages"] if stage["name"] == "train")
    return {
        "rows": {row["state"]: row for row in verdict["table"]},
        "train": train,
        "evaluation": verdict["evaluation"],
        "wall": time.perf_counter() - start,
        "scheme": str(recipe.scheme),
        "model": Path(recipe.model.source).stem,
    }


def record(found: dict[str, Any], method: str, learn: dict[str, float], seed: int) -> list[dict[str, Any]]:
    """The JSON objects of one run: parent, round-to-nearest, the calibrated start, and the export."""
    shared = {
        "model": found["model"],
        "scheme": found["scheme"].replace("int4-g64", "int4-g64-sym"),
        "tool": "tare",
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "evaluation": found["evaluation"],
    }
    rows, train = found["rows"], found["train"]
    out = []
    for state, name, source in (
        ("parent", "bf16", "parent"),
        ("rtn", "rtn", "artifact"),
        ("calibrate", "range", "artifact"),
    ):
        row = rows[state]
        out.append({**shared, "method": name, "seed": None, **numbers(row), "source": source})
    export = rows["compressed_tensors"]
    trained = {"seconds": train["seconds"], "peak_gb": train["peak_gpu_gb"], "learn": learn}
    trained["validation_kl"] = train["metrics"]["kl_end"]
    out.append({**shared, "method": method, "seed": seed, **numbers(export), "source": "export", **trained})
    return out


def numbers(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "ppl": row["perplexity"],
        "kl": row["kl"],
        "top1": row["top1"],
        "ppl_recovered": row["perplexity_recovered"],
        "kl_recovered": row["kl_recovered"],
    }


def main(argv: list[str]) -> None:
    own = dict(a.split("=", 1) for a in argv if a.split("=")[0] in ("methods", "seeds", "out"))
    arguments = [a for a in argv if a.split("=")[0] not in own]
    seeds = [int(seed) for seed in own.get("seeds", "0,1,2").split(",")]
    path = Path(own.get("out", "benchmarks/results/recovery.json"))
    results: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []

    def go(method: str, learn: dict[str, float], seed: int) -> dict[str, Any]:
        found = once(arguments, learn, seed)
        new = [r for r in record(found, method, learn, seed) if r not in results]
        results.extend(new)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        last = new[-1] if new else {}
        print(f"{method} seed {seed} {learn}: {json.dumps(last)} wall {found['wall']:.1f} s", flush=True)
        return found

    for method in own.get("methods", "bias,bias+scale").split(","):
        name = method.removeprefix("tuned:")
        learn = METHODS[name]
        if method.startswith("tuned:"):
            tried = [(go(name, rates, seeds[0])["train"]["metrics"]["kl_end"], rates) for rates in (learn, *CANDIDATES)]
            learn = min(tried, key=lambda pair: pair[0])[1]
        for seed in seeds:
            go(name, learn, seed)


if __name__ == "__main__":
    main(sys.argv[1:])
