"""The training loop: AdamW over what is learned, at most a few hundred steps.

Each rank takes its rows of the global batch; the small gradients are averaged over ranks in one reduction, so nothing
else of the model is ever wrapped or moved. Every `save_every` steps the whole state goes to disk (qat/resume.py); the
data order and the rate are functions of the step, so a resumed run has the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from qat.backward import Backward, head_loss
from qat.compiled import plain
from qat.resume import load_state, save_state
from qat.sections import Train
from qat.student import Student, run_blocks
from qat.teacher import Resident, Teacher
from qat.tokens import batches

UNIT_WINDOWS = 8  # windows on which units and starts are measured
VALIDATION = 8  # windows of the training text that are never trained on; they tell whether training helped


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


def rows_of(training: int, batch: int, seed: int, step: int, rank: int, world: int) -> Tensor:
    """Numbers of the windows, of `training`, that a rank trains on in a step."""
    rows = batch // world
    return batches(torch.arange(training), batch, seed, step)[rank * rows : (rank + 1) * rows]


def check_ranks(batch: int, world: int, where: str = "train") -> None:
    """Raise ValueError when the batch does not split over the ranks. where: the section of the recipe that has it."""
    if batch % world:
        raise ValueError(f"{where}.batch {batch} does not split over {world} processes; use a multiple of {world}")


def check_launcher(accelerator: Accelerator) -> None:
    """Raise ValueError when the launcher wants to accumulate gradients."""
    if accelerator.gradient_accumulation_steps != 1:
        raise ValueError("gradient accumulation is set in the launcher; the recipe owns it: use train.micro_batch")


@torch.no_grad()
def evaluate(teacher: Teacher, student: Student, windows: Tensor, first: int) -> float:
    """Mean KL per token over windows, which are numbered from `first` on. Inside `ends()`."""
    total = torch.zeros((), device=student.device)
    exact = Resident(teacher.model)
    for number, ids in enumerate(windows.split(1), first):
        target = (teacher.hidden(torch.tensor([number]), ids),)
        hidden = run_blocks(student, ids)
        total += head_loss(exact, student, target, hidden, ids.to(student.device), {"kl": 1.0}, 1.0, windows.numel())
    return total.item()


def train(
    accelerator: Accelerator,
    teacher: Teacher,
    student: Student,
    windows: Tensor,
    folder: Path,
    how: Train,
    *,
    micro_batch: int | None = None,
    checkpointed: int = 0,
    graph: bool = False,
    compiled: bool = False,
    progress: Callable[[int, dict[str, float]], None] = lambda step, numbers: None,
) -> dict[str, Any]:
    """Train the student in place; returns the history.

    windows: (num_windows, length) token ids. micro_batch: of this rank; None takes all of its windows at once.
    checkpointed, graph: of `Backward`. compiled: whether blocks were (`compile_blocks`). progress: told the step and
    its `loss`, and `kl` where it was validated. With how.validate_every the student ends with the best deltas that were
    validated. History: `loss` per step, `validation_start`, `validation` ([step, KL] pairs), `validation_end`, `ranks`,
    `ended` (why). Raises FloatingPointError for a non-finite loss and ValueError when the batch does not split over the
    ranks.
    """
    world, rank = accelerator.num_processes, accelerator.process_index
    check_ranks(how.batch, world)
    check_launcher(accelerator)
    rows = how.batch // world
    training, held = split_validation(windows)
    params = student.delta
    groups = [{"params": [p], "peak": student.learn[kind].rate} for kind, p in params.items()]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    best: dict[str, Tensor] = {}

    def validate() -> float:
        # the mean, as it decides whether training ends: ranks that disagree in the last bit would wait for each other
        with plain(compiled):
            own = evaluate(teacher, student, held, len(training))
        return average(accelerator, {}, torch.tensor(own, device=student.device))

    with student.ends():
        student.refresh()
        start = validate()  # of the artifact, before a start is found for what is learned
        with plain(compiled):
            student.begin(training[:UNIT_WINDOWS])
        history = load_state(folder, params, optimizer, best)
        if history is None:
            history = {"loss": [], "validation": [], "validation_start": start, "ranks": world, "ended": None}
            if how.enough is not None and start <= how.enough:
                return {**history, "validation_end": start, "ended": "nothing to recover"}
        student.refresh()
        tokens = rows * windows.shape[1]
        weights = dict[str, float](how.loss.items())
        backward = Backward(teacher, student, weights, how.temperature, tokens, checkpointed, graph)
        while len(history["loss"]) < how.steps and history["ended"] is None:
            step = len(history["loss"])
            chosen = rows_of(len(training), how.batch, how.seed, step, rank, world)
            backward.zero()
            for part in chosen.split(min(micro_batch or rows, rows)):
                backward.add(training[part], part)
            student.pull()
            mean = average(accelerator, params, backward.loss)
            if not math.isfinite(mean):
                raise FloatingPointError(f"the loss is {mean} at step {step}; lower train.learn's rates")
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * learning_rate(step, how.steps, how.warmup)
            optimizer.step()
            student.refresh()
            history["loss"].append(mean)
            numbers = {"loss": mean}
            if how.validate_every and ((step + 1) % how.validate_every == 0 or step + 1 == how.steps):
                numbers["kl"] = validate()
                history["validation"].append([step + 1, numbers["kl"]])
                _judge(history, params, best, how.patience, how.enough)
            progress(step + 1, numbers)
            saves = (step + 1) % how.save_every == 0 and step + 1 < how.steps
            if accelerator.is_main_process and saves:
                save_state(folder, params, optimizer, history, best)
        if best:
            for kind, p in params.items():
                p.data.copy_(best[kind])
            student.refresh()
        # deltas that were kept were measured when they were
        history["validation_end"] = min(value for _, value in history["validation"]) if best else validate()
    return history


def _judge(
    history: dict[str, Any],
    params: Mapping[str, Tensor],
    best: dict[str, Tensor],
    patience: int | None,
    enough: float | None,
) -> None:
    """Keep the best deltas, and decide whether training has ended, after a validation."""
    values = [value for _, value in history["validation"]]
    if values[-1] <= min(values):
        best |= {kind: p.detach().clone() for kind, p in params.items()}
    if enough is not None and values[-1] <= enough:
        history["ended"] = f"held-out KL {values[-1]:.4g} is at most train.enough"
    elif patience is not None and len(values) - 1 - values.index(min(values)) >= patience:
        history["ended"] = f"no better for {patience} validations"


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
