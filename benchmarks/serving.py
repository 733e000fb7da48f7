"""Exports in vLLM on one GPU: what serving costs, and that every format computes what was exported. Imports no Tare.

    python benchmarks/serving.py make FOLDER                     # 1. about 25 GB of random weights, shaped as an 8B
    python benchmarks/serving.py speed FOLDER                    # 2. batch 1 and 32
    python benchmarks/engine_exports.py EXPORTS only=demo        # 3. needs Tare; 200 MB, may be made elsewhere
    python benchmarks/serving.py check EXPORTS --only demo-int   # 4. INT4 and INT8, and again without Machete: Marlin
    python benchmarks/serving.py check EXPORTS --only demo-fp8 demo-w8a8

Each line is a piece of less than 8 minutes; a row that is measured again replaces the old one in --out
(benchmarks/results/serving.json, vllm_gpu.json), so results come together over several machines. Run it in vLLM's
environment (0.26 or later). `speed --models int4 int4-bias:marlin` takes others, the latter with vLLM's linear_backend
(int4-no-qkv-bias is there too), `--mode graphs` leaves torch.compile out and `--mode eager` CUDA graphs too. On a CPU:
`make F --shape tiny`, `speed F --mode eager --rounds 3`, `check`.

speed   Three engines share the machine, each a process: `bf16`, `int4` (GPTQ, symmetric, groups of 128) and
        `int4-bias`, the same codes with a bias on every linear. They take turns on the same prompts, the one that
        begins another in each round, while the others wait. Of a batch, after a short run that is not timed: seconds to
        the first token (a run of one token), between tokens (the rest of a run), tokens a second; medians over rounds,
        and medians and quartiles of the ratios within rounds.
check   benchmarks/vllm_cpu.py in bfloat16: KL to the dequantized reference, with the flags of the biases on and off,
        and what vLLM logs of its kernels. The exit code is 0 when each that loads agrees.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from itertools import combinations
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import vllm_cpu  # beside this file; sets what vLLM reads from the environment before it is imported
from serving_models import MODELS, SHAPES, make

WARM_UP = 8  # tokens before each timed run: after the others' turns the first ones are slow


def settings(mode: str, share: float, cache_gib: int) -> dict[str, Any]:
    """Of vLLM. share: of the GPU's memory that must be free, as several engines have a part of it."""
    how: dict[str, Any] = {"enforce_eager": mode == "eager", "dtype": "bfloat16"}
    if mode == "graphs":
        how["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    if vllm_cpu.GPU:  # on a CPU an environment variable says so
        how |= {"gpu_memory_utilization": share, "kv_cache_memory_bytes": cache_gib * 2**30}
    return how


def serve(folder: Path, how: dict[str, Any], longest: int, batch: int, pipe: Connection) -> None:
    """An engine that waits for (batch, inputs, outputs, seed) and answers with seconds; the body of a process.

    A list of windows of token ids is answered with their log-probs. how: more arguments of vLLM's.
    """
    kernels = vllm_cpu.Kernels()
    import vllm

    start = time.perf_counter()
    try:
        model = vllm.LLM(
            str(folder), max_model_len=longest, max_num_seqs=batch, skip_tokenizer_init=True, max_logprobs=-1,
            enable_prefix_caching=False, use_tqdm_on_load=False, **how,
        )  # fmt: skip
    except vllm_cpu.REFUSALS as error:
        pipe.send({"error": vllm_cpu.words(error), "kernels": list(kernels.found)})
        return
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    held = torch.cuda.max_memory_allocated() / 2**30 if vllm_cpu.GPU else None
    cache = model.llm_engine.vllm_config.cache_config
    loaded = {"load_seconds": round(time.perf_counter() - start, 1), "gpu_gb": held, "kernels": list(kernels.found)}
    loaded["cache_tokens"] = cache.num_gpu_blocks * cache.block_size
    pipe.send(loaded | {"vllm": vllm.__version__})
    while job := pipe.recv():
        if isinstance(job, list):
            try:
                pipe.send(vllm_cpu.score(model, job).numpy())
            except vllm_cpu.REFUSALS as error:
                pipe.send(vllm_cpu.words(error))
            continue
        batch, inputs, outputs, seed = job
        random = torch.Generator().manual_seed(seed)
        prompts = torch.randint(2, vocabulary, (batch, inputs), generator=random).tolist()
        asked = vllm.SamplingParams(max_tokens=outputs, ignore_eos=True, temperature=0.0, detokenize=False)
        start = time.perf_counter()
        answers = model.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(answer.outputs[0].token_ids) == outputs for answer in answers)
        pipe.send(seconds)


def speed(options: argparse.Namespace) -> int:
    """Rows of serving.json: one for each batch."""
    longest, how = options.inputs + options.outputs + 1, settings(options.mode, share=0.25, cache_gib=4)
    engines, processes = dict[str, Connection](), list[Any]()
    rows = {row["name"]: row for row in json.loads(options.out.read_text())} if options.out.exists() else {}
    try:
        asked = {}
        for name in options.models:
            folder, _, kernel = name.partition(":")
            asked[name] = options.folder / folder, how | ({"linear_backend": kernel} if kernel else {})
        loaded = begin(asked, longest, max(options.batch), engines, processes)
        if len(engines) < len(options.models):
            return 1
        for batch in options.batch:
            title = f"{options.folder.name} batch {batch} {options.mode} {' '.join(options.models)}"
            rows[title] = {
                "name": title, "inputs": options.inputs, "outputs": options.outputs, "torch": torch.__version__,
                "machine": vllm_cpu.machine(), "engines": loaded,
                **measured(engines, batch, options.inputs, options.outputs, options.rounds, options.seconds),
            }  # fmt: skip
            options.out.write_text(json.dumps(list(rows.values()), indent=1) + "\n", encoding="utf-8")
            show(rows[title])
    finally:
        for process in processes:
            process.kill()
    return 0


def begin(
    asked: dict[str, tuple[Path, dict[str, Any]]], longest: int, batch: int, engines: dict[str, Connection],
    processes: list[Any],
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Start engines, {name: (folder, vLLM's arguments)}, each in a process of its own; what each says, or {error}.

    Adds to the last two. On a GPU they load at once: how much memory each takes is said, so none measures the others.
    """
    context, said, waiting = get_context("spawn"), dict[str, dict[str, Any]](), dict[str, Connection]()
    for number, (name, (folder, how)) in enumerate(asked.items(), 1):
        waiting[name], theirs = context.Pipe()
        processes.append(context.Process(target=serve, args=(folder, how, longest, batch, theirs)))
        processes[-1].start()
        theirs.close()
        if vllm_cpu.GPU and number < len(asked):
            continue
        for started, ours in waiting.items():
            try:
                said[started] = ours.recv()
            except EOFError:
                said[started] = {"error": "the process died; its words are above"}
            if "error" not in said[started]:
                engines[started] = ours
            print(f"{started}: {said[started]}", flush=True)
        waiting.clear()
    return said


def measured(
    engines: dict[str, Connection], batch: int, inputs: int, outputs: int, rounds: int, limit: float
) -> dict[str, Any]:
    """{rounds: model -> lists over rounds, medians, ratios}. limit: seconds after which no round begins."""
    kept: dict[str, dict[str, list[float]]] = {
        name: {"first_token_s": [], "inter_token_s": [], "tokens_per_s": []} for name in engines
    }
    names, start = list(engines), time.perf_counter()
    for number in range(-1, rounds):  # the first one warms up
        if number > 2 and time.perf_counter() - start > limit:
            break
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            seconds = []
            for length in (WARM_UP, 1, outputs):
                engines[name].send((batch, inputs, length, number + 1))
                seconds.append(engines[name].recv())
            del seconds[0]
            if number >= 0:
                kept[name]["first_token_s"].append(seconds[0])
                kept[name]["inter_token_s"].append((seconds[1] - seconds[0]) / (outputs - 1))
                kept[name]["tokens_per_s"].append(batch * outputs / seconds[1])
    medians = {name: {key: statistics.median(values) for key, values in kept[name].items()} for name in names}
    ratios = {}
    for ours, theirs in combinations(names, 2):
        for key in kept[ours]:
            each = [a / b for a, b in zip(kept[ours][key], kept[theirs][key], strict=True)]
            low, middle, high = statistics.quantiles(each, n=4)
            ratios[f"{ours} / {theirs} {key}"] = {"median": middle, "quartiles": [low, high], "rounds": len(each)}
    return {"medians": medians, "ratios": ratios, "rounds": kept}


def show(row: dict[str, Any]) -> None:
    """A row for a person."""
    print(f"{row['name']}, {row['inputs']} tokens in, {row['outputs']} out")
    for name, m in row["medians"].items():
        print(
            f"  {name:10} first token {1e3 * m['first_token_s']:8.2f} ms, between tokens "
            f"{1e3 * m['inter_token_s']:7.3f} ms, {m['tokens_per_s']:9.1f} tokens/s"
        )
    for name, found in row["ratios"].items():
        low, high = found["quartiles"]
        print(f"  {name:38} {found['median']:.4f} (quartiles {low:.4f} to {high:.4f}, {found['rounds']} rounds)")
    sys.stdout.flush()


def check(options: argparse.Namespace) -> int:
    """vllm_cpu.py's comparison, and for INT4 and INT8 weights once more without the kernel that Hopper prefers."""
    passed = vllm_cpu.run(options)
    if vllm_cpu.GPU and any("int" in word or not word for word in options.only):
        os.environ["VLLM_DISABLED_KERNELS"] = "MacheteLinearKernel"
        options.only = [word for word in options.only if "int" in word] or ["-int"]
        passed &= vllm_cpu.run(options, " without Machete")
    return 0 if passed else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make_ = commands.add_parser("make")
    make_.add_argument("folder", type=Path)
    make_.add_argument("--shape", choices=SHAPES, default="8b")
    speed_ = commands.add_parser("speed")
    speed_.add_argument("folder", type=Path)
    speed_.add_argument("--models", nargs="+", default=list(MODELS), help="folders in FOLDER, NAME or NAME:KERNEL")
    speed_.add_argument("--batch", nargs="+", type=int, default=[1, 32])
    speed_.add_argument("--inputs", type=int, default=128, help="tokens of a prompt")
    speed_.add_argument("--outputs", type=int, default=128, help="tokens of an answer")
    speed_.add_argument("--rounds", type=int, default=30)
    speed_.add_argument("--seconds", type=float, default=90, help="for each batch; at least 3 rounds")
    speed_.add_argument("--mode", choices=("compiled", "graphs", "eager"), default="compiled")
    speed_.add_argument("--out", type=Path, default=vllm_cpu.ROOT / "benchmarks/results/serving.json")
    vllm_cpu.add_arguments(commands.add_parser("check"), "vllm_gpu.json")
    options = parser.parse_args()
    if options.command == "make":
        make(options.folder, SHAPES[options.shape])
        return 0
    return speed(options) if options.command == "speed" else check(options)


if __name__ == "__main__":
    sys.exit(main())
