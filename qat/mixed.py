"""`tare sensitivity`: what each fused group of linears costs in KL, and overrides that keep to a budget of bits.

The model is calibrated once in each candidate format, by the recipe's own methods, as variants of a run of its own,
`<name>-sensitivity`. One pass forward and back (`calibrate.mixed`) then gives the KL that each group adds in each
format, and `calibrate.budget` chooses. Everything but the choice is cached.

Bits per weight count codes, scales and zero points of every linear that the recipe quantizes, those included that the
choice leaves in 16 bits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import ValidationError
from torch import Tensor

from calibrate import budget, mixed
from qat import arguments, coverage, manifest, pipeline, report
from qat.artifact import Artifact, save_tensors
from qat.checkpoint import SafetensorsFolder
from qat.groups import SKIP, Group, overrides, show, stored_bits, write_table
from qat.job import Job
from qat.model import Model
from qat.ranks import RunError
from qat.recipe import Recipe, RecipeError, load
from qat.scheme import TensorFormat
from qat.stages import INTERRUPTED, STOPPED, Run

Candidates = Mapping[str, TensorFormat | None]  # by label, the recipe's own first; None leaves a group as it is
OWN = ("bits", "candidates", "out")
PRODUCTS, TABLE, SNIPPET = "products.safetensors", "sensitivity.csv", "overrides.yaml"
BATCH = 8  # windows that go through a block together
FINEST = 32  # the smallest group size that is a candidate by itself


def main(argv: list[str]) -> int:
    """Measure, print, write; with `bits=`, choose. Returns the exit code."""
    try:
        return run(argv)
    except RecipeError as error:
        report.complain(str(error))
        return 2
    except KeyboardInterrupt:
        report.complain(STOPPED)
        return INTERRUPTED
    except (ValueError, RunError, FloatingPointError, OSError) as error:
        report.complain(manifest.told(error))
        return 1


def _with(arguments: list[str], *ours: str) -> list[str]:
    """A command line on which `ours` take the place of what it says of the same keys."""
    keys = tuple(word.partition("=")[0] + "." for word in ours)
    return [*(word for word in arguments if not f"{word.partition('=')[0]}.".startswith(keys)), *ours]


def run(argv: list[str]) -> int:
    """As `main`. Raises RecipeError for what is wrong before any work, ValueError as a run does."""
    own, rest = _split(argv)
    base = load(rest)
    _check(base, own)
    candidates = _candidates(base, own.get("candidates"))
    formats = {label: fmt.model_dump() for label, fmt in candidates.items() if fmt is not None}
    if len(formats) > 1:  # a mix that one of the export formats cannot hold is refused here
        load(_with(rest, f"scheme.overrides={json.dumps({f'*{label}': fmt for label, fmt in formats.items()})}"))
    variants = {label: {"scheme": {"weights": fmt}} for label, fmt in formats.items()}
    only = ["until=calibrate", "train=null", "gate=null", f"variants={json.dumps(variants)}"]
    with Run(load(_with(rest, f"name={base.name}-sensitivity", *only))) as folder:
        job = Job(folder, pipeline.task_texts)
        model = Model(job.parent.config, job.parent.tensors, job.device, job.dtype)
        groups = groups_of(model, base, candidates)
        labels = list(candidates)
        _check_bits(groups, own.get("bits"))
        groups = measure(job, model, groups, labels)
        chosen = _choose(groups, labels, own["bits"]) if "bits" in own else None
        table = folder.folder / TABLE
        if report.is_main():
            write_table(groups, chosen, table)
            show(groups, chosen)
            if chosen:
                scheme = overrides(groups, chosen, candidates, base.scheme)
                _write(rest, scheme, folder.folder / SNIPPET, own.get("out"))
        return folder.finish("ungated", report=table)


def _split(argv: list[str]) -> tuple[dict[str, Any], list[str]]:
    """This command's own `key=value`s, read as YAML, and the rest."""
    own: dict[str, Any] = {}
    rest = []
    for argument in argv:
        if argument.partition("=")[0] in OWN:
            arguments.override(own, argument)
        else:
            rest.append(argument)
    return own, rest


def _check(base: Recipe, own: Mapping[str, Any]) -> None:
    wrong, bits = [], own.get("bits")
    if "bits" in own and (isinstance(bits, bool) or not isinstance(bits, int | float) or not 0 < bits <= 16):
        wrong.append(f"bits: {bits!r} is not a number of bits per weight up to 16, such as bits=4.5")
    if "out" in own and "bits" not in own:
        wrong.append("out: without a budget nothing is chosen that could be written; add bits=4.5")
    if "out" in own and (not (folder := Path(str(own["out"])).parent).is_dir() or not os.access(folder, os.W_OK)):
        wrong.append(f"out: {folder} is no folder that this user may write in; make it, or name a file elsewhere")
    if base.variants:
        given = ", ".join(base.variants)
        wrong.append(f"variants: one scheme is measured, and there are {given}; set variants={{}}")
    if base.scheme.overrides:
        wrong.append("scheme.overrides: these are what the command chooses; set scheme.overrides={}")
    if base.scheme.inputs is not None:
        wrong.append("scheme.inputs: only rounded weights are measured; set it to null, with int4 or int8 weights")
    if wrong:
        raise RecipeError("tare sensitivity cannot do this:\n" + "\n".join(f"  {line}" for line in wrong))


def _candidates(base: Recipe, given: Any) -> Candidates:
    """Unless they are given: int4 in halves of the group size down to 32, int8 in the same groups, and 16 bits."""
    own = base.scheme.weights
    if given is None:
        given, size = [SKIP], own.group_size or 0
        if own.bits == 4:
            given.insert(0, {"dtype": "int8", "group_size": own.group_size})
        while own.bits == 4 and size % (2 * FINEST) == 0 and size > FINEST:
            size //= 2
            given.insert(-2, own.model_dump() | {"group_size": size})
    found: dict[str, TensorFormat | None] = {str(own): own}
    for value in given if isinstance(given, list) else [given]:
        if value == SKIP:
            found[SKIP] = None
            continue
        try:
            fmt = TensorFormat.model_validate(value)
        except ValidationError as error:
            why = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise RecipeError(
                f"candidates: {value!r} is neither {SKIP} nor a format such as {{dtype: int8}}: {why}"
            ) from error
        found[str(fmt)] = fmt
    if len(found) < 2:
        raise RecipeError(f"candidates: nothing to choose from beside {own}; name another format, or {SKIP}")
    return found


def groups_of(model: Model, base: Recipe, candidates: Candidates) -> list[Group]:
    """The fused groups that the recipe quantizes, with the bits of each candidate.

    Raises ValueError for a candidate whose group size does not divide a layer's inputs, and for a `skip` that splits
    linears which engines run as one.
    """
    num_blocks, arch = len(model.blocks), model.arch
    for fmt in candidates.values():
        if fmt is not None:
            scheme = base.scheme.model_copy(update={"weights": fmt})
            covered = coverage.formats(arch, model.in_features, scheme)
    if set(base.export.formats) - {"dense"}:
        coverage.whole_groups(arch, num_blocks, base.scheme)
    found = []
    for index in range(num_blocks):
        experts = f"{arch.blocks}.{index}.{arch.experts}."
        for fused in arch.fused(index):
            names = [name for name in fused if name in covered]
            linears = [model.root.get_submodule(name) for name in names]
            shapes = [(linear.out_features, linear.in_features) for linear in linears]
            bits = {label: sum(stored_bits(fmt, *shape) for shape in shapes) for label, fmt in candidates.items()}
            pattern = f"{experts}*" if names == fused and names[0].startswith(experts) else None
            if names:
                found.append(Group(names, pattern, sum(rows * columns for rows, columns in shapes), bits))
    return found


def measure(job: Job, model: Model, groups: Sequence[Group], labels: Sequence[str]) -> list[Group]:
    """Calibrate in every format, on all ranks, and find the KL of every group, on rank 0."""
    for index in range(len(job.steps)):
        job.stage(index, partial(pipeline.calibrate_, job, index), everyone=True)
    made = {step.variant: job.made[index] for index, step in enumerate(job.steps)}
    quantized = [label for label in labels if label != SKIP]
    blocks: list[list[list[str]]] = [[] for _ in model.blocks]
    for group in groups:
        blocks[model.arch.split(group.names[0])[0]].append(group.names)

    def work(out: Path) -> dict[str, Any]:
        artifacts = [Artifact(made[label].path) for label in quantized]
        plain, squares = mixed.products(
            model,
            job.calibration.windows,
            blocks,
            lambda name: torch.stack([_error(artifact, model, name) for artifact in artifacts]),
            job.recipe.data.calibration.seed,
            BATCH,
            int(job.recipe.compute.activation_gb * 2**30),
        )
        save_tensors({"plain": plain, "squares": squares}, out / PRODUCTS)
        return {"windows": len(plain), "groups": plain.shape[1]}

    content = {"version": mixed.VERSION, "text": job.root["calibration"], "compute": job.recipe.compute.dtype}
    stage = job.run.stage("sensitivity", content=content, parents=[made[label] for label in quantized], work=work)
    products = SafetensorsFolder(stage.path, [PRODUCTS])
    kl = mixed.kl(products.get("plain"), products.get("squares"), job.calibration.windows.shape[1]).tolist()
    kept = {SKIP: 0.0} if SKIP in labels else {}
    return [
        replace(group, kl=dict(zip(quantized, values, strict=True)) | kept)
        for group, values in zip(groups, kl, strict=True)
    ]


def _error(artifact: Artifact, model: Model, name: str) -> Tensor:
    """Stored less full-precision weight (N, K) float32 of a linear, with the factors of a transform taken out."""
    weight = artifact.get(f"{name}.weight")
    rows, columns = artifact.factors(name)
    return weight / rows / columns - model.tensors.get(f"{name}.weight").float()


def _check_bits(groups: Sequence[Group], bits: float | None) -> None:
    least = sum(min(group.bits.values()) for group in groups) / sum(group.weights for group in groups)
    if bits is not None and bits < least:
        raise RecipeError(f"bits={bits} is below {least:.4f}, what the smallest candidates take with their scales")


def _choose(groups: Sequence[Group], labels: Sequence[str], bits: float) -> list[str]:
    """The candidate of each group."""
    losses = [[group.kl[label] for label in labels] for group in groups]
    sizes = [[group.bits[label] for label in labels] for group in groups]
    return [labels[i] for i in budget.allocate(losses, sizes, int(bits * sum(group.weights for group in groups)))]


def _write(argv: list[str], scheme: Mapping[str, Any], snippet: Path, out: str | None) -> None:
    """The chosen part of the scheme, and at `out` the recipe of the command line with it."""
    style: dict[str, Any] = {"sort_keys": False, "width": 120}
    snippet.write_text(yaml.safe_dump({"scheme": scheme}, **style), encoding="utf-8")
    report.say(f"overrides: {snippet}")
    if out is None:
        return
    file, values, _ = arguments.read(argv)
    if values["name"] == file.stem:
        del values["name"]  # the new file's own
    values["scheme"] = {**(values.get("scheme") or {}), **scheme}
    head = f"# {file.name} with what tare sensitivity chose for each group of linears\n"
    Path(out).write_text(head + yaml.safe_dump(values, **style), encoding="utf-8")
    report.say(f"recipe: {out}")
