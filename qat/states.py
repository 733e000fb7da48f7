"""What of a job is measured, and what it exports: the states of the gate's table, and the exported directories."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import export.stage
import gate.stage
from calibrate.rtn import Rtn
from qat import manifest
from qat.artifact import Artifact
from qat.job import Job
from qat.recipe import Recipe


def states_of(job: Job) -> list[gate.stage.State]:
    """Round-to-nearest and the artifact after each stage of every variant, for the table."""
    parent, states = job.parent, []
    for index, step in enumerate(job.steps):
        if step.kind not in ("calibrate", "train"):
            continue
        stage, recipe = job.made[index], job.recipe_of(step)
        name, baseline = label(step.variant, step.name), None
        if recipe.scheme.weights.is_int:
            baseline = label(step.variant, "rtn")
            if step.name == "calibrate":
                rtn = Rtn(parent.tensors, parent.arch, recipe.scheme)
                # of a quantized cache the baseline has the same scales: what it loses is by its weights
                cache = gate.stage.artifact_state("", Artifact(stage.path), parent.config).cache_scales
                key = manifest.digest(["rtn", recipe.scheme.model_dump(), stage.key if cache else None])
                states.append(
                    gate.stage.State(
                        baseline,
                        key,
                        parent.config,
                        rtn,
                        parent.folder,
                        str(recipe.scheme),
                        gate.stage.dynamic_inputs(recipe.scheme, rtn.covers),
                        baseline=baseline,
                        cache_scales=cache,
                    )
                )
        seconds = stage.manifest["seconds"]
        made = gate.stage.artifact_state(
            name, Artifact(stage.path), parent.config, stage.key, baseline=baseline, seconds=seconds
        )
        states.append(made)
    return states


def exports_of(job: Job) -> list[gate.stage.Exported]:
    """Every exported directory, with what it came from."""
    exports = []
    for one in exporting(job):
        stage, recipe = job.made[one.place], one.recipe
        exports.append(
            gate.stage.Exported(
                one.name,
                stage.path / one.format,
                export.stage.loaders(recipe.export.engines, one.format, recipe.scheme),
                stage.key,
                Artifact(job.source(one.place).path),
                label(one.variant, "rtn") if recipe.scheme.weights.is_int else None,
                stage.manifest["seconds"],
                recipe.gate,
            )
        )
    return exports


class Exporting(NamedTuple):
    """A step that exports. place: in the steps of a job. name: what its export is called."""

    place: int
    name: str
    format: str
    variant: str | None
    recipe: Recipe


def exporting(job: Job) -> Iterator[Exporting]:
    """The steps of a job that export, with the recipe of their variant."""
    for index, step in enumerate(job.steps):
        if step.format is not None:
            name = label(step.variant, step.format)
            yield Exporting(index, name, step.format, step.variant, job.recipe_of(step))


def check_bytes(job: Job) -> None:
    """Raise ValueError when a file of an export is not, byte for byte, what the export stage wrote."""
    for one in exporting(job):
        stage = job.made[one.place]
        if name := manifest.altered(stage.path, stage.manifest):
            raise ValueError(
                f"{stage.path / name} was changed after it was exported; nothing is released from it. Export again "
                "with fresh=export"
            )


def label(variant: str | None, name: str) -> str:
    return f"{variant}/{name}" if variant else name
