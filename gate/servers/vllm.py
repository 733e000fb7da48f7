"""vLLM: `vllm serve` and `vllm bench serve`, which 0.26 and 0.32 have with the same options."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VERSION = 2
HEALTH = "/health"  # answers 200 once it serves
NAME = "measured"  # in requests
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def serve(program: str, folder: Path, port: int, dtype: str, batch: int, arguments: Sequence[str]) -> list[str]:
    """The command that serves `folder`. Prefixes are not cached: every prompt is to be read.

    batch: the most requests at once; by default vLLM prepares CUDA graphs for hundreds.
    """
    words = ["serve", str(folder), "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype]
    words += ["--served-model-name", NAME, "--max-num-seqs", str(batch)]
    return [*_call(program), *words, "--no-enable-prefix-caching", *arguments]


def bench(
    program: str, folder: Path, port: int, batch: int, prompt_tokens: int, output_tokens: int, out: Path
) -> list[str]:
    """The command that asks `batch` requests at once and writes JSON to `out`."""
    options = {
        "backend": "openai", "base-url": f"http://127.0.0.1:{port}", "endpoint": "/v1/completions", "model": folder,
        "served-model-name": NAME,
        "dataset-name": "random", "random-input-len": prompt_tokens, "random-output-len": output_tokens,
        "num-prompts": max(8, 4 * batch), "max-concurrency": batch, "num-warmups": batch, "result-dir": out.parent,
        "result-filename": out.name,
    }  # fmt: skip
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    return [*_call(program), "bench", "serve", *words, "--ignore-eos", "--save-result", "--disable-tqdm"]


def read(out: Path) -> dict[str, float]:
    """{first_token_s, inter_token_s, tokens_per_s} of a benchmark. Raises ValueError when requests failed."""
    said: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    if said["failed"] or not said["completed"]:
        raise ValueError(f"{said['failed']} of its requests failed")
    return {
        "first_token_s": said["mean_ttft_ms"] / 1e3,
        "inter_token_s": said["mean_tpot_ms"] / 1e3,
        "tokens_per_s": said["output_throughput"],
    }


def weights_gb(log: str) -> float | None:
    """GB of GPU memory that the weights take, by the server's log; None where it does not say, as on a CPU."""
    found = re.search(r"Model loading took ([\d.]+) GiB", log)
    return float(found[1]) * 2**30 / 1e9 if found else None


def _call(program: str) -> list[str]:
    is_python = Path(program).name.startswith("python")
    return [program, "-m", "vllm.entrypoints.cli.main"] if is_python else [program]
