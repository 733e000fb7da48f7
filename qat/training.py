"""The train stage: teacher and student from their folders, the loop, the trained artifact."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from qat import loop, report
from qat.artifact import Artifact, derive
from qat.model import Model
from qat.parent import Parent
from qat.sections import Train
from qat.student import Student
from qat.tokens import Corpus


def run(
    parent: Parent,
    artifact_folder: Path,
    corpus: Corpus,
    train: Train,
    slots: Collection[str],
    out: Path,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Train on all ranks; rank 0 writes the trained artifact into `out`. Returns metrics.

    slots: linears of a block whose bias the engines load. Raises ValueError when training made the student worse on
    windows that it did not train on.
    """
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision="no")
    learn: dict[str, float] = {kind: rate for kind, rate in train.learn.items() if kind != "bias" or slots}
    if not learn:
        raise ValueError("train.learn has only bias, but the engines load none; learn scale too, or set train to null")
    teacher = Model(parent.config, parent.tensors, device, dtype, resident=True)
    student = Student(teacher, Artifact(artifact_folder), learn, slots)
    with report.Steps("train", total=train.steps) as steps:

        def progress(done: int, loss: float) -> None:
            steps.advance(f"kl {loss:.4f}", by=done - steps.done)

        history = loop.train(
            accelerator,
            teacher,
            student,
            corpus.windows,
            out,
            rates=learn,
            steps=train.steps,
            batch=train.batch,
            micro_batch=train.micro_batch,
            warmup=train.warmup,
            temperature=train.temperature,
            seed=train.seed,
            save_every=train.save_every,
            progress=progress,
        )
    start, end = history["validation_start"], history["validation_end"]
    if not end <= start:  # NaN is worse too
        raise ValueError(
            f"training made the model worse: KL on held-out windows of the training text went from {start:.3g} to "
            f"{end:.3g}; lower the rates in train.learn ({dict(train.learn)}), or give more text than {corpus.source}"
        )
    if accelerator.is_main_process:
        said = {"learned": sorted(learn), "steps": train.steps, "text": corpus.fingerprint}
        derive(artifact_folder, out, student.overlay(), {"train": said})
        loop.clear_state(out)
    trained = sum(p.numel() for p in student.delta.values())
    return {
        "kl_start": start,
        "kl_end": end,
        "tokens": train.steps * train.batch * train.length,
        "trained_parameters": trained,
        "ranks": accelerator.num_processes,
        "text": corpus.fingerprint,
        "loss": history["loss"],
    }
