"""The training loop: forward KL to the teacher's logits, AdamW over biases and scales, at most a few hundred steps.

Each rank takes its rows of the global batch; the small gradients are averaged over ranks in one reduction, so nothing
else of the model is ever wrapped or moved. Every `save_every` steps the whole state goes to `resume.safetensors` in the
stage's folder; the data order and the rate are functions of the step, so a resumed run has the same bits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import safe_open
from torch import Tensor

from qat.artifact import save_tensors
from qat.losses import kl
from qat.model import Model
from qat.student import Student, run_blocks
from qat.tokens import batches

RESUME, HISTORY = "resume.safetensors", "history.json"
UNIT_WINDOWS = 8  # windows on which the size of each linear's outputs is measured
VALIDATION = 8  # windows of the training text that are never trained on; they tell whether training helped
LOGIT_BYTES = {
    "cpu": 512 * 2**20,
    "cuda": 4 * 2**30,
}  # float32 logits alive at once; the head and the loss run in chunks of tokens


def learning_rate(step: int, steps: int, warmup: int) -> float:
    """Multiplier of the peak rate: linear warm-up, then a cosine to 0 at `steps`."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def split_validation(windows: Tensor) -> tuple[Tensor, Tensor]:
    """(training, validation) windows: the last ones, at most a quarter, are held out."""
    held = max(1, min(VALIDATION, len(windows) // 4))
    if len(windows) < 2:
        raise ValueError("data.training has one window only; training needs at least two: give more text")
    return windows[:-held], windows[-held:]


def head_loss(
    teacher: Model, student: Student, target: Tensor, hidden: Tensor, temperature: float, tokens: int
) -> Tensor:
    """KL summed over the tokens of `hidden`, divided by `tokens`; runs backward into `hidden` when it needs a gradient.

    target, hidden: last block's outputs (batch, length, hidden). Logits exist for one chunk of tokens at a time.
    """
    leaf = hidden.detach().requires_grad_(hidden.requires_grad)
    chunk = max(16, LOGIT_BYTES[hidden.device.type] // (4 * teacher.config.vocab_size * 6))
    total = torch.zeros((), device=hidden.device)
    for t, s in zip(target.flatten(0, 1).split(chunk), leaf.flatten(0, 1).split(chunk), strict=True):
        with torch.no_grad():
            goal = teacher.logits(t)
        loss = kl(goal, student.logits(s), temperature) * (len(t) / tokens)
        if leaf.requires_grad:
            loss.backward()
        total += loss.detach()
    if leaf.requires_grad:
        hidden.backward(leaf.grad)
    return total


@torch.no_grad()
def evaluate(teacher: Model, student: Student, windows: Tensor, temperature: float = 1.0) -> float:
    """Mean KL per token over windows."""
    total = torch.zeros((), device=teacher.device)
    for ids in windows.split(1):
        target, hidden = run_blocks(teacher, ids), run_blocks(student, ids)
        total += head_loss(teacher, student, target, hidden, temperature, windows.numel())
    return total.item()


def save_state(
    folder: Path, params: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, history: dict[str, Any]
) -> None:
    """Parameters, AdamW moments and the history so far. The tensor file carries its step, so a torn pair is noticed."""
    state: dict[str, Tensor] = {"step": torch.tensor(len(history["loss"]))}
    for name, p in params.items():
        state[f"{name}.param"] = p.detach()
        state.update({f"{name}.{k}": v for k, v in optimizer.state[p].items()})
    temporary = folder / (HISTORY + ".part")
    temporary.write_text(json.dumps(history))
    save_tensors(state, folder / RESUME)
    temporary.replace(folder / HISTORY)


def clear_state(folder: Path) -> None:
    """Remove what `save_state` wrote."""
    for name in (RESUME, HISTORY, HISTORY + ".part"):
        (folder / name).unlink(missing_ok=True)


def load_state(folder: Path, params: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """Undo of `save_state`; None when there is nothing, or a pair that a kill tore apart (its part file still fits)."""
    if not (folder / RESUME).exists():
        return None
    with safe_open(folder / RESUME, framework="pt") as f:
        step = int(f.get_tensor("step"))
        for candidate in (folder / HISTORY, folder / (HISTORY + ".part")):
            history = json.loads(candidate.read_text()) if candidate.exists() else None
            if history and len(history["loss"]) == step:
                break
        else:
            return None
        for name, p in params.items():
            p.data.copy_(f.get_tensor(f"{name}.param"))
            moments = {k: f.get_tensor(f"{name}.{k}") for k in ("step", "exp_avg", "exp_avg_sq")}
            optimizer.state[p] = {k: v if k == "step" else v.to(p.device) for k, v in moments.items()}
    return history


def train(
    accelerator: Accelerator,
    teacher: Model,
    student: Student,
    windows: Tensor,
    folder: Path,
    *,
    rates: Mapping[str, float],
    steps: int,
    batch: int,
    micro_batch: int | None,
    warmup: int,
    temperature: float,
    seed: int,
    save_every: int,
    progress: Callable[[int, float], None] = lambda step, loss: None,
) -> dict[str, Any]:
    """Train the student's biases and scales in place; returns the history (loss per step, validation KL, ranks).

    rates: peak AdamW rate of each learnable (`bias`, `scale`). windows: (num_windows, length) token ids. Raises
    FloatingPointError for a non-finite loss and ValueError when the batch does not split over the ranks.
    """
    world, rank = accelerator.num_processes, accelerator.process_index
    if batch % world:
        raise ValueError(f"train.batch {batch} does not split over {world} processes; use a multiple of {world}")
    if accelerator.gradient_accumulation_steps != 1:
        raise ValueError("gradient accumulation is set in the launcher; the recipe owns it: use train.micro_batch")
    rows = batch // world
    micro = min(micro_batch or rows, rows)
    training, held = split_validation(windows)
    student.set_bias_unit(training[:UNIT_WINDOWS])
    params = student.delta
    groups = [{"params": [params[kind]], "peak": rate} for kind, rate in rates.items() if kind in params]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    with teacher.ends(), student.ends():
        history = load_state(folder, params, optimizer)
        if history is None:
            history = {"loss": [], "validation_start": evaluate(teacher, student, held), "ranks": world}
        for step in range(len(history["loss"]), steps):
            ids = batches(training, batch, seed, step)[rank * rows : (rank + 1) * rows]
            loss = torch.zeros((), device=teacher.device)
            for part in ids.split(micro):
                with torch.no_grad():
                    target = run_blocks(teacher, part)
                hidden = run_blocks(student, part)
                loss += head_loss(teacher, student, target, hidden, temperature, ids.numel())
            mean = average(accelerator, params, loss)
            if not math.isfinite(mean):
                raise FloatingPointError(f"the loss is {mean} at step {step}; lower train.learn's rates")
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * learning_rate(step, steps, warmup)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            history["loss"].append(mean)
            progress(step + 1, mean)
            if accelerator.is_main_process and (step + 1) % save_every == 0 and step + 1 < steps:
                save_state(folder, params, optimizer, history)
        history["validation_end"] = evaluate(teacher, student, held)
    return history


def average(accelerator: Accelerator, params: Mapping[str, Tensor], loss: Tensor) -> float:
    """Average the gradients, in place, and the loss over all ranks; one reduction of one flat tensor."""
    if accelerator.num_processes > 1:
        grads = [p.grad for p in params.values() if p.grad is not None]
        flat = torch.cat([loss.detach().float().view(1), *(g.flatten() for g in grads)])
        flat = accelerator.reduce(flat, reduction="mean")
        loss, offset = flat[0], 1
        for grad in grads:
            grad.copy_(flat[offset : offset + grad.numel()].view_as(grad))
            offset += grad.numel()
    return loss.item()
