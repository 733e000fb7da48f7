"""The train stage: teacher and student from their folders, the loop, the trained artifact."""

from __future__ import annotations

import time
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import ProjectConfiguration, parse_flag_from_env
from torch.distributed.device_mesh import init_device_mesh
from transformers import PretrainedConfig

from qat import compiled, loop, plugins, report
from qat.arch import arch_of
from qat.artifact import Artifact, derive
from qat.backward import blocks_to_checkpoint, tokens_at_once
from qat.model import Model
from qat.parent import Parent
from qat.resume import TEACHER, clear_state
from qat.sections import Train
from qat.shard import Shard
from qat.stages import PARTIAL
from qat.student import Student
from qat.teacher import HiddenCache, Resident, Teacher, TopCache
from qat.tokens import Corpus

TRACKERS = "trackers"  # folder of a run with what trackers write, outside of its stages


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
    run_folder, cpu = out.parent, device.type == "cpu"
    check(train, parent.config, slots, device, PartialState(cpu=cpu).num_processes)
    config = ProjectConfiguration(logging_dir=str(run_folder / TRACKERS / out.name.removesuffix(PARTIAL)))
    accelerator = Accelerator(cpu=cpu, mixed_precision="no", log_with=train.trackers or None, project_config=config)
    loop.check_launcher(accelerator)
    accelerator.init_trackers(run_folder.name, _plain(train))
    learn: dict[str, Any] = {kind: options for kind, options in train.learn.items() if kind != "bias" or slots}
    rows = train.batch // accelerator.num_processes
    micro = min(train.micro_batch or rows, rows)
    sharded = is_sharded(accelerator.num_processes)
    mesh = init_device_mesh(device.type, (accelerator.num_processes,)) if sharded else None
    model = Model(
        parent.config, parent.tensors, device, dtype, resident=True, prepare=Shard(mesh) if mesh is not None else None
    )
    teacher = teacher_of(train, model, corpus, out, accelerator, micro)
    shard = None if mesh is None else Shard(mesh, "norm" in learn)
    student = Student(model, Artifact(artifact_folder), learn, slots, shard, train.student == "packed")
    graph, compiles = _kernels(train, learn, model, sharded, rows * train.length * train.steps)
    if compiles:
        compiled.compile_blocks(student, model)
    if train.checkpoint == "auto":
        with student.ends():
            own = blocks_to_checkpoint(student, micro, train.length)
        # the most that a rank needs, as blocks that are split are gathered by all ranks in one order
        checkpointed = int(accelerator.gather(torch.tensor([own], device=device)).max())
    else:
        checkpointed = train.checkpoint
    ends: list[float] = []
    with report.Steps("train", total=train.steps) as steps:

        def progress(done: int, numbers: dict[str, float]) -> None:
            ends.append(time.perf_counter())
            steps.at(done, f"loss {numbers['loss']:.4f}")
            accelerator.log(numbers, done)

        history = loop.train(
            accelerator,
            teacher,
            student,
            corpus.windows,
            out,
            train,
            micro_batch=micro,
            checkpointed=checkpointed,
            graph=graph,
            compiled=compiles,
            progress=progress,
        )
    for tracker in accelerator.trackers:  # `end_training` would close the process group as well
        tracker.finish()
    start, end = history["validation_start"], history["validation_end"]
    if not end <= start:  # NaN is worse too
        rates = {kind: options.rate for kind, options in learn.items()}
        raise ValueError(
            f"training made the model worse: KL on held-out windows of the training text went from {start:.6g} to "
            f"{end:.6g}; lower the rates in train.learn ({rates}), or give more text than {corpus.source}"
        )
    if history["ended"]:
        report.say(f"train: ended after {len(history['loss'])} steps: {history['ended']}")
    if accelerator.is_main_process:
        done = len(history["loss"])
        said = {"learned": sorted(learn), "steps": done, "text": corpus.fingerprint}
        before = student.artifact.meta.get("train")
        derive(artifact_folder, out, student.overlay() if done else {}, {"train": said | {"after": before}})
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        clear_state(out)
    metrics = {
        "kl_start": start,
        "kl_end": end,
        "tokens": len(history["loss"]) * train.batch * train.length,
        "trained_parameters": sum(p.numel() for p in student.delta.values()),
        "ranks": accelerator.num_processes,
        "text": corpus.fingerprint,
        "overlap": corpus.overlap,
        "checkpointed_blocks": checkpointed,
        "cuda_graph": graph,
        "compiled": compiles,
        "sharded": sharded,
        "seconds_per_step": median(b - a for a, b in pairwise(ends)) if len(ends) > 1 else None,
        "ended": history["ended"],
        "validation": history["validation"],
        "loss": history["loss"],
    }
    return metrics | ({"teacher_tail": teacher.tail} if isinstance(teacher, TopCache) else {})


def is_sharded(world: int) -> bool:
    """Whether the launch file splits weights over the processes; accelerator.distributed_type says so on GPUs only."""
    return parse_flag_from_env("ACCELERATE_USE_FSDP") and world > 1


def check(
    train: Train,
    config: PretrainedConfig,
    slots: Collection[str],
    device: torch.device,
    world: int,
    where: str = "train",
) -> None:
    """Raise ValueError for what cannot be done on this machine, with this model and these engines; needs no artifact.

    config: of the model. slots: as `run` takes them. world: processes. where: what the recipe calls the section.
    """
    sharded = is_sharded(world)
    there = {str(name) for name in get_available_trackers()}
    for name in train.trackers:  # Accelerate leaves one that is not installed out without a word
        if name not in there:
            raise ValueError(f"{where}.trackers {name} is not installed: pip install {name}, or leave it out")
    loop.check_ranks(train.batch, world, where)
    for kind, options in train.learn.items():
        module = plugins.find("qat.learn", kind)
        if hasattr(module, "check"):
            try:
                module.check(options, train.length, slots)
            except ValueError as error:
                raise ValueError(f"{where}.learn.{kind}.{error}") from error
    if set(train.learn) == {"bias"} and not slots:
        why = "has only bias, but the engines of export.engines load none"
        raise ValueError(f"{where}.learn {why}; learn scale too, or set {where} to null")
    if isinstance(train.teacher, int) and train.teacher > config.vocab_size:
        raise ValueError(f"{where}.teacher {train.teacher} is more than the {config.vocab_size} tokens there are")
    if isinstance(train.checkpoint, int) and train.checkpoint > config.num_hidden_layers:
        raise ValueError(
            f"{where}.checkpoint {train.checkpoint} is more than the {config.num_hidden_layers} blocks there are"
        )
    if sharded and train.student == "packed":
        raise ValueError(
            f"{where}.student is packed, but this launch splits weights over ranks: take dequantized, or a launch file "
            "without FSDP"
        )
    if train.cuda_graph is True and device.type != "cuda":
        raise ValueError(f"{where}.cuda_graph is true, but this run computes on {device}: set it to auto or false")
    if train.cuda_graph is True and sharded:
        raise ValueError(
            f"{where}.cuda_graph is true, but weights split over ranks move in every step: set it to auto or false"
        )
    if train.compile is True:
        against = compiled.refusal(train.learn, device, sharded, arch_of(config).experts is not None)
        if against:
            raise ValueError(f"{where}.compile is true, but {against}: set it to auto or false")


def _kernels(train: Train, learn: Collection[str], model: Model, sharded: bool, tokens: int) -> tuple[bool, bool]:
    """Whether a step is captured in a CUDA graph, and whether blocks are compiled. tokens: of this rank's steps."""
    experts = model.arch.experts is not None  # their kernels depend on the data
    graph = train.cuda_graph
    if graph == "auto":
        graph = model.device.type == "cuda" and not experts and not sharded
    compiles = train.compile
    if compiles == "auto":
        against = compiled.refusal(learn, model.device, sharded, experts)
        compiles = graph and not against and compiled.pays(model, tokens)
    return graph, compiles


def _plain(train: Train) -> dict[str, Any]:
    """The settings of a stage as trackers take them: one level, numbers and words."""
    found = dict[str, Any]()
    for key, value in train.model_dump().items():
        for inner, one in value.items() if isinstance(value, dict) else [("", value)]:
            name = f"{key}.{inner}" if inner else key
            found[name] = one if isinstance(one, bool | int | float | str) else str(one)
    return found


def teacher_of(
    train: Train, model: Model, corpus: Corpus, folder: Path, accelerator: Accelerator, batch: int
) -> Teacher:
    """What train.teacher asks for; a cache is computed here, for the windows that this rank will see."""
    if train.teacher == "resident":
        return Resident(model)
    world, rank = accelerator.num_processes, accelerator.process_index
    training, held = loop.split_validation(corpus.windows)
    seen = [loop.rows_of(len(training), train.batch, train.seed, step, rank, world) for step in range(train.steps)]
    last = torch.arange(len(training), len(training) + len(held))
    numbers, path = torch.cat([*seen, last]), folder / f"{TEACHER}-{rank}-of-{world}"
    if train.teacher == "hidden":
        return HiddenCache(model, corpus.windows, numbers, path, batch)
    chunk = tokens_at_once(model.device, model.config.vocab_size)
    return TopCache(model, corpus.windows, numbers, last, path, batch, train.teacher, train.temperature, chunk)
