"""What the engine's KV cache in 8 bits saves and costs: FP16 against FP8 and INT8, by tensor and by token. No Tare.

    python benchmarks/kv_cache.py DIRECTORY [--static DIRECTORY] [--cache fp8 ...] [--text FILE]

In vLLM's environment, on a GPU or a CPU. DIRECTORY: any checkpoint. --static: the same weights with static scales of
the cache in the files (scheme.kv_cache of a recipe; benchmarks/engine_exports.py makes demo-int4 and demo-int4-kv8).
Each kind of cache is an engine of its own; they take turns, as in serving.py. On a CPU they need about 2 GB each. On a
GPU decoding is captured as CUDA graphs. What long prompts gain: serving.py's FOLDER/int4-bias with `--windows 0
--cache-gib 10 --batch 32 --inputs 2048`.

    bytes/token    of cache, by how many tokens the engine finds room for in --cache-gib
    KL             nats, of its log-probs at every position of some text to those with the 16-bit cache; 0: bit-equal,
                   which means that the engine accepted the option and did not apply it
    first, between, tokens/s    of a batch; medians over rounds, and the median ratio to the 16-bit cache

What the engine refuses is a row with its own words. The table goes to benchmarks/results/kv_cache.json, by machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import serving  # beside this file
import torch
import vllm_cpu
from transformers import AutoTokenizer

KINDS = {  # --kv-cache-dtype, and how its scales are found
    "auto": "16 bits",
    "fp8": "E4M3, per tensor, scale 1",
    "fp8_e5m2": "E5M2, per tensor, scale 1",
    "fp8_per_token_head": "E4M3, per token and head, found while serving",
    "int8_per_token_head": "INT8, per token and head, found while serving",
}
STATIC = "fp8 static"


def rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One for each kind of cache, the 16-bit one first."""
    windows = list[list[int]]()
    if options.windows:
        ids = AutoTokenizer.from_pretrained(options.directory)(options.text.read_text(encoding="utf-8"))["input_ids"]
        windows = [ids[i * options.length : (i + 1) * options.length] for i in range(options.windows)]
    longest = max(options.length, options.inputs + options.outputs) + 1
    asked = {name: (options.directory, name) for name in ("auto", *options.cache)}
    if options.static:
        asked[STATIC] = (options.static, "auto")  # the files say fp8
    engines, processes, found = dict[str, Connection](), list[Any](), dict[str, dict[str, Any]]()
    try:
        how = serving.settings(options.mode, share=0.12, cache_gib=options.cache_gib)
        how["dtype"] = "bfloat16" if vllm_cpu.GPU else "float16"
        engine_of = {name: (folder, how | {"kv_cache_dtype": kind}) for name, (folder, kind) in asked.items()}
        for name, said in serving.begin(engine_of, longest, options.batch, engines, processes).items():
            found[name] = {"cache": name, "scales": KINDS.get(name, "E4M3, per tensor, static, from the files"), **said}
        logits = {}
        for name, engine in list(engines.items()) if windows else ():
            engine.send(windows)
            logits[name] = engine.recv()
            if isinstance(logits[name], str):
                found[name]["error"] = logits.pop(name)
                del engines[name]
        if "auto" not in engines:
            return list(found.values())
        for name in engines:
            found[name]["bytes_per_token"] = round(options.cache_gib * 2**30 / found[name]["cache_tokens"], 1)
        for name, values in logits.items():
            found[name]["kl"] = vllm_cpu.kl(torch.from_numpy(logits["auto"]), torch.from_numpy(values))
            found[name]["bit_equal"] = name != "auto" and bool(np.array_equal(values, logits["auto"]))
        times = serving.measured(
            engines, options.batch, options.inputs, options.outputs, options.rounds, options.seconds
        )
    finally:
        for process in processes:
            process.kill()
    for name in engines:
        found[name] |= times["medians"][name]
        for key, own in times["rounds"]["auto"].items():
            each = [ours / theirs for ours, theirs in zip(times["rounds"][name][key], own, strict=True)]
            found[name][f"{key}_ratio"] = statistics.median(each)
    return list(found.values())


def line(row: dict[str, Any]) -> str:
    """A row for a person."""
    if "error" in row:
        return f"{row['cache']:20} refused: {row['error']}"
    kl = f"{'-':>13}{'-':>10}{'-':>9}"
    if "kl" in row:
        median = "not applied" if row["bit_equal"] else f"{row['kl']['median']:.1e}"
        kl = f"{median:>13}{row['kl']['mean']:10.1e}{row['kl']['top1']:9.2%}"
    return (
        f"{row['cache']:20}{row['bytes_per_token']:10.1f}{kl}"
        f"{1e3 * row['first_token_s']:10.2f}{1e3 * row['inter_token_s']:10.3f}{row['tokens_per_s']:11.1f}"
        f"{row['tokens_per_s_ratio']:8.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--static", type=Path)
    parser.add_argument("--cache", nargs="*", default=[name for name in KINDS if name != "auto"])
    parser.add_argument("--text", type=Path, default=vllm_cpu.ROOT / "recipes/demo/text/evaluation.txt")
    parser.add_argument("--windows", type=int, default=2, help="0: no KL, no tokenizer (random weights)")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--inputs", type=int, default=512)
    parser.add_argument("--outputs", type=int, default=64)
    parser.add_argument("--cache-gib", type=int, default=1, help="of each engine's cache, on a GPU")
    parser.add_argument("--mode", choices=("graphs", "eager"), default="graphs" if vllm_cpu.GPU else "eager")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--out", type=Path, default=vllm_cpu.ROOT / "benchmarks/results/kv_cache.json")
    options = parser.parse_args()
    if not vllm_cpu.GPU and options.cache_gib != 1:
        parser.error("--cache-gib takes no effect on a CPU: VLLM_CPU_KVCACHE_SPACE is 1 there")
    found = rows(options)
    tables = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    title = f"{options.directory.parent.name}/{options.directory.name} on {vllm_cpu.machine()}"
    asked = {key: getattr(options, key) for key in ("windows", "length", "batch", "inputs", "outputs", "mode")}
    tables[title] = {**asked, "torch": torch.__version__, "rows": found}
    options.out.write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")
    print(f"{title}, batch {options.batch}, {options.inputs} tokens in, {options.outputs} out")
    print("cache               bytes/token    KL median      mean    top-1  first ms between ms   tokens/s   ratio")
    for row in found:
        print(line(row))


if __name__ == "__main__":
    main()
