"""Many micro runs in one process: memory, open files, threads and what is left on disk must not grow.

    python benchmarks/soak.py [runs=200] [out=benchmarks/results/soak.json] [work=FOLDER]

Recipes change from run to run (`RECIPES`, one after the other); all share one output folder, whose runs are removed
when they are done, and every other time round the same command is given twice, so that stages are reused. The sample
after each run says what this process holds. The first rounds fill caches; after them nothing may grow.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import psutil
from transformers import AutoTokenizer

from gate import _bootstrap
from gate.readers import _headers
from qat import __version__, parent
from qat.train import main

SEED = "data.calibration.seed={round}"
# {round} makes the stages of each time round new ones
RECIPES: tuple[tuple[str, ...], ...] = (
    (),
    ("calibrate.transform=awq", "calibrate.round=gptq", "export.formats=[gptq]", "train=null", SEED),
    ("scheme.weights={dtype: int8}", "calibrate.range=mse", "train=null", SEED),
    ("scheme.weights={dtype: fp8_e4m3, per: tensor}", "scheme.inputs={dtype: fp8_e4m3, per: tensor, dynamic: false}",
     "calibrate.range=max", "train=null", "export.formats=[modelopt, dense]", SEED),
    ("calibrate.round={name: learned, steps: 2}", "train=null", "export.formats=[awq]", "compute.activation_gb=1.0e-9"),
    ("gate=null", "train.teacher=hidden", "train.save_every=1", "train.steps=4"),
    ("gate.divergence.max_kl=1e-9",),  # refused
    ("data.evaluation.length=4096",),  # an error
)  # fmt: skip
CODES = (0, 0, 0, 0, 0, 0, 3, 1)
WARM = 2  # times round


def load_tokenizer(*given: Any, **named: Any) -> Any:
    """A tokenizer without the cache of words, 0.4 MB after a text, which tokenizers 0.23.3 never frees."""
    tokenizer = AutoTokenizer.from_pretrained(*given, **named)
    tokenizer.backend_tokenizer.model._resize_cache(0)
    return tokenizer


def sample(work: Path, temporary: Path) -> dict[str, int]:
    """What this process holds, and what lies in its folders. rss: bytes."""
    for bounded in (_headers._read, _bootstrap._interval):  # they stop growing, but later than this
        bounded.cache_clear()
    gc.collect()
    if sys.platform == "linux":  # glibc keeps what is free for later; that is no growth
        ctypes.CDLL(None).malloc_trim(0)
    process = psutil.Process()
    return {
        "rss": process.memory_info().rss,
        "files": process.num_fds(),
        "threads": process.num_threads(),
        "python_threads": threading.active_count(),
        "objects": len(gc.get_objects()),
        "temporary": sum(1 for _ in temporary.rglob("*")),
        "torn": sum(1 for pattern in ("*.part*", "*.old") for _ in work.rglob(pattern)),
        "in_output": len(list((work / "runs").iterdir())),
    }


def soak(runs: int, work: Path, recipes: tuple[tuple[str, ...], ...] = RECIPES) -> list[dict[str, int]]:
    """A sample after each of so many runs in `work`. Raises AssertionError for a run that ends in another way."""
    temporary = work / "tmp"
    temporary.mkdir()
    before, tempfile.tempdir = tempfile.tempdir, str(temporary)
    parent.AutoTokenizer = SimpleNamespace(from_pretrained=load_tokenizer)
    os.environ["TARE_LOG"] = "quiet"
    samples = []
    try:
        for number in range(runs):
            which = number % len(recipes)
            command = ["recipe=micro.yaml", "compute.device=cpu", f"output={work / 'runs'}"]
            command += [word.replace("{round}", str(number // len(recipes))) for word in recipes[which]]
            command.append(f"name=run{which}")
            for _ in range(1 + number // len(recipes) % 2):
                code = main(command)
                assert code == CODES[RECIPES.index(recipes[which])], (recipes[which], code)
            shutil.rmtree(work / f"runs/run{which}")
            samples.append(sample(work, temporary))
    finally:
        tempfile.tempdir, parent.AutoTokenizer = before, AutoTokenizer
    return samples


def growth(samples: list[dict[str, int]], first: int) -> dict[str, float]:
    """What each number grew by in a run, from the `first` sample on: the slope of a straight line."""
    kept = samples[first:]
    middle = (len(kept) - 1) / 2
    spread = sum((i - middle) ** 2 for i in range(len(kept)))
    return {key: sum((i - middle) * s[key] for i, s in enumerate(kept)) / spread for key in kept[0]}


def report(samples: list[dict[str, int]]) -> dict[str, Any]:
    first = WARM * len(RECIPES)
    return {
        "tare": __version__,
        "runs": len(samples),
        "warm": first,
        "growth": growth(samples, first),
        "samples": samples,
    }


if __name__ == "__main__":
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        place = Path(given.get("work", folder)).resolve()
        found = report(soak(int(given.get("runs", "200")), place))
    Path(given.get("out", "benchmarks/results/soak.json")).write_text(json.dumps(found) + "\n", encoding="utf-8")
    print(json.dumps(found["growth"], indent=1), "\n", found["samples"][found["warm"]], "\n", found["samples"][-1])
