"""What each stage is given and what becomes of it; `qat/train.py` calls these in order."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from accelerate import PartialState

import calibrate.observe
import export.release
import export.stage
import gate.stage
from export.carrier import trainable_biases
from gate.stage import table
from qat import coverage, manifest, report, results, training
from qat.job import Job
from qat.recipe import Recipe
from qat.stages import Stage
from qat.states import check_bytes, exporting, exports_of, label, states_of

MEASURED = "measured.json"


def task_texts(recipe: Recipe) -> Mapping[str, Iterable[str]]:
    """The texts of the gate's tasks by the key that names them: nothing is learned from these either."""
    asked = (recipe.model_dump()["gate"] or {}).get("tasks")
    return gate.stage.task_texts(asked["offline"], asked["lm_eval"]) if asked else {}


def check(job: Job) -> None:
    """Raise ValueError for what a late stage would find only then: examples of tasks, what training cannot do."""
    recipe, parent = job.recipe, job.parent
    for variant, one in recipe.by_variant:
        slots, _ = trainable_biases(parent.arch, parent.config, one.export.engines)
        for place, train in enumerate(one.trainings if recipe.until != "calibrate" else ()):
            where = f"train.{place}" if isinstance(one.train, list) else "train"
            where = f"variant {variant}: {where}" if variant else where
            training.check(train, parent.config, slots, job.device, job.run.world_size, where)
    if any(step.kind == "gate" for step in job.steps) and (tasks := (recipe.gate or {}).get("tasks")):
        gate.stage.examples_of(tasks, parent.tokenizer, parent.config)


def calibrate_(job: Job, index: int, out: Path) -> dict[str, Any]:
    """Parent -> artifact: integer codes, scales, zero points; block by block, on all ranks."""
    PartialState(cpu=job.device.type == "cpu")  # opens the process group when there are several ranks
    job.check_texts()
    recipe, parent = job.recipe_of(job.steps[index]), job.parent
    methods = {question: getattr(recipe.calibrate, question) for question in calibrate.observe.QUESTIONS}
    if set(recipe.export.formats) - {"dense"}:
        coverage.whole_groups(parent.arch, parent.config.num_hidden_layers, recipe.scheme)
    with report.Steps("calibrate", total=parent.config.num_hidden_layers, unit="block") as steps:
        metrics = calibrate.observe.run(
            parent.config,
            parent.tensors,
            recipe.scheme,
            job.calibration.windows,
            methods,
            parent.folder,
            out,
            device=job.device,
            dtype=job.dtype,
            activation_bytes=int(recipe.compute.activation_gb * 2**30),
            seed=recipe.data.calibration.seed,
            progress=lambda done, total, error: steps.at(done, f"error {error:.4f}"),
        )
    if rare := metrics.get("without_statistics"):
        report.say(f"{job.steps[index].label}: {results.without_statistics(rare)}")
    return metrics | {"overlap": job.calibration.overlap}


def train_(job: Job, index: int, out: Path) -> dict[str, Any]:
    """Artifact -> artifact with trained biases and scales; on all ranks."""
    recipe, parent = job.recipe_of(job.steps[index]), job.parent
    job.check_texts()
    train = recipe.trainings[job.steps[index].turn]
    slots, left_out = trainable_biases(parent.arch, parent.config, recipe.export.engines)
    if left_out and "bias" in train.learn:
        report.say(left_out)
    source, corpus = job.source(index).path, job.training(train.length)
    return training.run(parent, source, corpus, train, slots, out, job.device, job.dtype)


def export_(job: Job, index: int, out: Path) -> dict[str, Any]:
    """Artifact -> one complete directory in one format."""
    step, recipe = job.steps[index], job.recipe_of(job.steps[index])
    assert step.format is not None
    wanted, shard = recipe.export, int(recipe.export.shard_gb * 1e9)
    export.stage.run(job.source(index).path, [step.format], wanted.engines, shard, out, recipe.model.dtype)
    return {"bytes": sum(p.stat().st_size for p in (out / step.format).iterdir())}


def gate_(job: Job, index: int, out: Path) -> dict[str, Any]:
    """Exported directories, read back, against the parent: faults and measurements, no judgement yet."""
    check_bytes(job)
    job.check_texts()
    parent = job.parent
    states, exports = states_of(job), exports_of(job)
    checks, cache = job.recipe.gate or {}, job.run.folder.parent / ".measured"  # one for all runs
    cache.mkdir(exist_ok=True)
    faults, sound = gate.stage.inspect_all(exports, checks, cache)
    own = gate.stage.plain_state("parent", parent.folder)
    total = (1 + len(states) + len(sound)) * len(job.evaluation.windows)
    with report.Steps("gate", total=total, unit="window") as steps:
        measured = gate.stage.measure_all(
            own, [*states, *sound], job.evaluation.windows, cache, job.device, job.dtype, steps.reach
        )
    if "tasks" in checks:
        tokenizer, options = parent.tokenizer, checks["tasks"]
        examples = [own, *sound]
        gate.stage.measure_tasks(measured, examples, tokenizer, options, cache, job.device, job.dtype)
    if "latency" in checks:
        asked: Any = checks["latency"]
        served = {"parent": parent.folder}
        served |= {e.name: e.directory for e in exports if not faults[e.name] and asked.engine in e.engines}
        with report.Steps("latency", total=len(served) * asked.pairs, unit="start") as steps:
            gate.stage.measure_latency(measured, served, job.recipe.model.dtype, asked, steps.advance)
    manifest.write_json(out / MEASURED, {"faults": faults, "measured": measured})
    kept = ("perplexity", "kl", "top1")
    return {name: {key: state[key] for key in kept} for name, state in measured["states"].items()}


def judge(job: Job) -> dict[str, Any] | None:
    """Thresholds on what the gate stage measured; None without a gate. Writes verdict.json, prints the table."""
    found = [job.made[index] for index, step in enumerate(job.steps) if step.name == "gate"]
    if not found:
        return None
    said = json.loads((found[0].path / MEASURED).read_text(encoding="utf-8"))
    path = job.run.folder / "verdict.json"
    verdict = gate.stage.verdict(path, said["measured"], exports_of(job), said["faults"], job.recipe.gate or {})
    report.say(table.text(verdict["table"]))
    for key, columns in (("tasks", table.TASKS), ("latency", table.LATENCY)):
        if verdict[key]:
            report.say(table.text(verdict[key], columns))
    why = [f"{status} {name}: {text}" for status, name, text in gate.stage.problems(verdict)]
    for line in why:
        report.say(line)
    if why and report.log_format() == "quiet" and job.run.rank == 0:
        more = f"; {len(why) - 1} more in {path}" if len(why) > 1 else ""
        report.complain(why[0] + more)
    return verdict


def release(job: Job, verdict: dict[str, Any] | None) -> Stage | None:
    """The release stage with the exports that the gate lets out, each on its own; None when it lets none out."""
    let_out = sorted(name for name, judged in verdict["exports"].items() if judged["released"]) if verdict else []
    if verdict is None or not let_out:
        return None
    parents = [stage for stage in job.run.stages if stage.name in ("export", "gate")]
    card = parent_card(job)

    def work(out: Path) -> dict[str, Any]:
        check_bytes(job)  # what is released is what was measured
        notes: dict[str, list[str]] = {}
        for place, name, form, variant, recipe in exporting(job):
            if name not in let_out:
                continue
            shown = ("parent", label(variant, "rtn"), name)
            rows = [row for row in verdict["table"] if row["state"] in shown]
            facts = card | {
                "scheme": str(recipe.scheme),
                "format": form,
                "calibrate": recipe.model_dump()["calibrate"],
                "trainings": [train.model_dump() for train in recipe.trainings],
                "evaluation": verdict["evaluation"] | {"source": Path(job.evaluation.source).name},
                "rows": [{key: value for key, value in row.items() if key != "seconds"} for row in rows],
                "confidence": verdict["statistics"]["confidence"],
                "tasks": tasks_of(verdict, name),
                "data": job.root,
            }
            loaders = export.stage.loaders(recipe.export.engines, form, recipe.scheme)
            title = f"{Path(job.parent.name).name}-{name.replace('/', '-')}"
            notes[name] = export.release.release(job.made[place].path / form, out / name, title, loaders, facts)
        return {"exports": let_out, "notes": notes}

    thresholds = {variant or "": one.model_dump()["gate"] for variant, one in job.recipe.by_variant}
    content = {"thresholds": thresholds, "card": card, "exports": dict.fromkeys(let_out, "released")}
    return job.run.stage("release", content=content, parents=parents, work=work)


def tasks_of(verdict: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The tasks of an export, for its card: {task, metric, score, parent, examples}."""
    ours, theirs = (verdict["states"][state].get("tasks", {}) for state in (name, "parent"))
    return [
        {
            "task": task,
            "metric": found["metric"],
            "score": found["score"],
            "parent": theirs[task]["score"],
            "examples": len(found["scores"]),
        }
        for task, found in ours.items()
    ]


def parent_card(job: Job) -> dict[str, Any]:
    """What a model card says of the parent."""
    parent, licence = job.parent, None
    readme = parent.folder / "README.md"
    if readme.is_file():
        lines = readme.read_text(encoding="utf-8").splitlines()[:30]
        licence = next((line.partition(":")[2].strip() for line in lines if line.startswith("license:")), None)
    return {"base_model": parent.name, "revision": parent.revision, "license": licence}


def finish(job: Job, verdict: dict[str, Any] | None, released: Stage | None) -> int:
    """Say what came of the run; returns the exit code."""
    exports = {}
    for place, name, form, _, recipe in exporting(job):
        is_released = released is not None and name in released.metrics["exports"]
        path = released.path / name if released and is_released else job.made[place].path / form
        exports[name] = {
            "path": path,
            "format": form,
            "scheme": str(recipe.scheme),
            "engines": recipe.export.engines,
            "released": is_released,
        }
        report.say(f"{'released' if is_released else 'exported'} {name}: {path}")
        for note in released.metrics.get("notes", {}).get(name, []) if released and is_released else []:
            report.say(f"  {note}")
    status = verdict["status"] if verdict else "ungated"
    report.say(f"status: {status}")
    shown = results.write(job, verdict, status)
    report.say(f"report: {shown}")
    said = {"exports": exports, "verdict": job.run.folder / "verdict.json" if verdict else None, "report": shown}
    return job.run.finish(status, **said, last_released=released.path if released else None)
