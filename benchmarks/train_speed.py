"""Speed of training against plain bf16 full fine-tuning of the same model, on one device, in one run.

    python benchmarks/train_speed.py [config=llama3-8b|tiny|FOLDER] [layers=32] [length=4096] [micro=1] \\
        [accumulate=4] [steps=40] [warmup=5] [seconds=100] [modes='baseline;bias+resident;...'] [graph=auto] \\
        [group=128] [resident_gb=60] [cached_gb=40] [device=cuda|cpu] [out=benchmarks/results/train_speed.json]

Weights, codes and text are random: times do not depend on them. A step is `accumulate` micro-batches of micro x length
tokens. The baseline is Hugging Face's model with AdamW (fused, state in bfloat16), activation checkpointing in every
block, next-token loss, no teacher. Ours: LEARNED+resident computes the teacher in each micro-batch, LEARNED+cached
reads its last hidden states from a file made before (its time is stated apart; its memory counts); +packed after that
is `train.student: packed`, +compiled `train.compile: true`, whose own time is in the first_step of the first such mode.
As many blocks keep their activations as fit under resident_gb and cached_gb of allocated memory. A mode ends early
after `seconds`; the number of steps is recorded.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from _options import read
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from qat import plugins
from qat.arch import arch_of
from qat.backward import Backward, blocks_to_checkpoint
from qat.compiled import compile_blocks, refusal
from qat.model import Model
from qat.quant import Quantized
from qat.scheme import Scheme
from qat.student import Student
from qat.teacher import HiddenCache, Resident

SHAPES = {
    "llama3-8b": {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                  "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
                  "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "tie_word_embeddings": False},
    "tiny": {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
             "num_attention_heads": 4, "num_key_value_heads": 2},
}  # fmt: skip
MODES = [
    "baseline",
    "bias+resident",
    "bias+cached",
    "bias,scale+resident",
    "bias,scale+cached",
    "bias,gain,norm+resident",
    "bias+resident+packed",
    "bias,scale+resident+packed",
    "bias,scale+cached+packed",
    "bias+resident+compiled",
    "bias+cached+compiled",
    "bias,scale+resident+compiled",
    "bias,scale+cached+compiled",
]
DEFAULTS: dict[str, Any] = {
    "config": "llama3-8b", "layers": 0, "length": 4096, "micro": 1, "accumulate": 4, "steps": 40, "warmup": 5,
    "seconds": 100, "modes": ";".join(MODES), "graph": "auto", "group": 128, "resident_gb": 60, "cached_gb": 40,
    "device": "cuda" if torch.cuda.is_available() else "cpu", "out": "benchmarks/results/train_speed.json",
}  # fmt: skip


class RandomTensors:
    """Random weights of a config, made on the device when asked for."""

    def __init__(self, config: PretrainedConfig, device: str) -> None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        self.shapes = {name: p.shape for name, p in model.named_parameters()}
        self.device = device

    def names(self) -> list[str]:
        return sorted(self.shapes)

    def get(self, name: str) -> Tensor:
        if "norm" in name:
            return torch.ones(self.shapes[name], device=self.device, dtype=torch.bfloat16)
        return torch.randn(self.shapes[name], device=self.device, dtype=torch.bfloat16) * 0.02


class RandomArtifact(RandomTensors):
    """What `Student` reads of an `Artifact`: int4 codes in groups, nothing transformed."""

    def __init__(self, config: PretrainedConfig, device: str, group: int) -> None:
        super().__init__(config, device)
        self.scheme = Scheme.model_validate({"weights": {"dtype": "int4", "group_size": group}})
        arch = arch_of(config)
        linears = [name for block in range(config.num_hidden_layers) for name in arch.block_linears(block)]
        self.formats = dict.fromkeys(linears, self.scheme.weights)

    def quantized(self, name: str) -> Quantized:
        rows, columns = self.shapes[f"{name}.weight"]
        codes = torch.randint(0, 16, (rows, columns), device=self.device, dtype=torch.uint8)
        groups = columns // (self.scheme.weights.group_size or columns)
        return Quantized(codes, torch.full((rows, groups), 0.02 / 4, device=self.device).bfloat16().float())

    def optional(self, name: str) -> None:
        return None

    def cache_scales(self, attention: str) -> None:
        return None


def timed(step: Callable[[int], float], given: dict[str, Any]) -> dict[str, Any]:
    """Run warm-up and measured steps; each is timed to its end (the loss is read)."""
    start = time.perf_counter()
    step(0)
    first = time.perf_counter() - start
    for index in range(1, given["warmup"]):
        step(index)
    if given["device"] == "cuda":
        torch.cuda.synchronize()
    seconds: list[float] = []
    while len(seconds) < given["steps"] and sum(seconds) < given["seconds"]:
        start = time.perf_counter()
        loss = step(given["warmup"] + len(seconds))
        if given["device"] == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    tokens = given["micro"] * given["length"] * given["accumulate"]
    peak = torch.cuda.max_memory_allocated() / 1e9 if given["device"] == "cuda" else None
    middle = statistics.median(seconds)
    return {"tokens_per_second": tokens / middle, "first_step": first, "seconds_per_step": middle,
            "steps": len(seconds), "loss": loss, "slowest": max(seconds), "peak_gpu_gb": peak}  # fmt: skip


def baseline(config: PretrainedConfig, windows: Tensor, given: dict[str, Any]) -> dict[str, Any]:
    """Plain full fine-tuning in bfloat16."""
    with torch.device(given["device"]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=given["device"] == "cuda")

    def step(index: int) -> float:
        total = torch.zeros((), device=given["device"])
        for part in micro_batches(index, given):
            ids = windows[part].to(given["device"])
            loss = model(ids, labels=ids, use_cache=False).loss / given["accumulate"]
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total.item()

    return timed(step, given)


def ours(
    learned: list[str], how: list[str], config: PretrainedConfig, windows: Tensor, given: dict[str, Any]
) -> dict[str, Any]:
    """The step of qat/loop.py. how: resident or cached, packed, compiled."""
    cached, packed, compiled = (word in how for word in ("cached", "packed", "compiled"))
    device = torch.device(given["device"])
    model = Model(config, RandomTensors(config, given["device"]), device, torch.bfloat16, resident=True)
    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, model.ends():
        teacher = Resident(model)
        if cached:
            start = time.perf_counter()
            path = Path(folder) / "teacher"
            teacher = HiddenCache(model, windows, torch.arange(len(windows)), path, given["micro"])
            facts["cache_seconds"] = time.perf_counter() - start
        options = {kind: plugins.options("qat.learn", kind)() for kind in learned}
        artifact: Any = RandomArtifact(config, given["device"], given["group"])
        student = Student(model, artifact, options, model.arch.linears, packed=packed)
        student.begin(windows[:1])
        if compiled:
            compile_blocks(student, model)
        held = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        free = int(1e9 * (given["cached_gb"] if cached else given["resident_gb"]) - held)
        keep = blocks_to_checkpoint(student, given["micro"], given["length"], free)
        tokens = given["micro"] * given["length"] * given["accumulate"]
        graph = device.type == "cuda" if given["graph"] == "auto" else given["graph"] == "true"
        backward = Backward(teacher, student, {"kl": 1.0}, 1.0, tokens, keep, graph)
        groups = [{"params": [p], "lr": options[kind].rate} for kind, p in student.delta.items()]
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)

        def step(index: int) -> float:
            backward.zero()
            for part in micro_batches(index, given):
                backward.add(windows[part], part)
            student.pull()
            loss = backward.loss.item()
            optimizer.step()
            student.refresh()
            return loss

        facts |= {"checkpointed_blocks": keep, "cuda_graph": graph, "weights_gb": held / 1e9}
        return facts | timed(step, given)


def micro_batches(index: int, given: dict[str, Any]) -> tuple[Tensor, ...]:
    rows = given["micro"] * given["accumulate"]
    return torch.arange(index * rows, (index + 1) * rows).split(given["micro"])


def check(mode: str, device: torch.device) -> None:
    """End the script for a mode that is none, before any is measured."""
    learned, *how = mode.split("+")
    known = how[:1] in (["resident"], ["cached"]) and {*how[1:]} <= {"packed", "compiled"}
    if mode != "baseline" and not known:
        raise SystemExit(
            f"mode {mode!r} is not baseline, LEARNED+resident or LEARNED+cached, nor +packed or +compiled of these"
        )
    if "compiled" in how and (why := refusal(learned.split(","), device)):
        raise SystemExit(f"mode {mode!r}: {why}")


def main(argv: list[str]) -> None:
    given = dict(DEFAULTS)
    for key, value in read(argv, {key: str(value) for key, value in DEFAULTS.items()}).items():
        try:
            given[key] = type(DEFAULTS[key])(value)
        except ValueError as error:
            raise SystemExit(f"{key}={value}: {error}") from None
    if given["steps"] < 1 or given["warmup"] < 1:
        raise SystemExit("steps and warmup must be 1 or more")
    for mode in given["modes"].split(";"):
        check(mode, torch.device(given["device"]))
    named = SHAPES.get(given["config"])
    config = LlamaConfig(**named) if named else AutoConfig.from_pretrained(given["config"])
    config.num_hidden_layers = given["layers"] or config.num_hidden_layers
    path = Path(given["out"])
    results: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    rows = (given["warmup"] + given["steps"]) * given["accumulate"] * given["micro"]
    windows = torch.randint(config.vocab_size, (rows, given["length"]), generator=torch.Generator().manual_seed(0))
    machine = torch.cuda.get_device_name() if given["device"] == "cuda" else "cpu"
    said = ("config", "length", "micro", "accumulate", "group")
    shared = {"machine": machine, "layers": config.num_hidden_layers, **{key: given[key] for key in said}}
    plain: float | None = None
    for mode in given["modes"].split(";"):
        learned, *how = mode.split("+")
        torch.manual_seed(0)
        if given["device"] == "cuda":
            torch.cuda.reset_peak_memory_stats()
        if mode == "baseline":
            found = baseline(config, windows, given)
            plain = found["tokens_per_second"]
        else:
            found = ours(learned.split(","), how, config, windows, given)
        ratio = None if plain is None else found["tokens_per_second"] / plain
        results.append({**shared, "mode": mode, "ratio": ratio, **found})
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(results[-1]), flush=True)
        gc.collect()
        if given["device"] == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1:])
