"""What a run leaves for people and for pipelines beside verdict.json: report.html, junit.xml, summary.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

import gate.report
import gate.report.pipelines
from calibrate.block import FEW_TOKENS
from qat import __version__, overlap
from qat.job import Job
from qat.stages import kind

TEXT_OF = {"calibrate": "calibration", "train": "training"}
NAMED = 6  # linears that a sentence names
KEPT = ("name", "variant", "key", "reused", "seconds", "peak_rss_gb", "peak_gpu_gb")


def write(job: Job, verdict: dict[str, Any] | None, status: str) -> Path:
    """Write them into the run's folder on rank 0; gives the path of the report."""
    folder = job.run.folder
    if job.run.rank == 0:
        if verdict is not None:
            gate.report.pipelines.write(folder, job.recipe.name, verdict)
        return gate.report.write(folder, "report", data(job, verdict, status))
    return folder / "report.html"


def data(job: Job, verdict: dict[str, Any] | None, status: str) -> dict[str, Any]:
    """What the report of a run shows; see `gate.report`."""
    said = gate.report.empty(job.recipe.name) | {"status": status, "facts": facts(job.parent, None)}
    if verdict is not None:
        kept = ("evaluation", "table", "tasks", "latency", "exports", "statistics")
        said |= {key: verdict[key] for key in kept}
        said |= gate.report.measured(verdict["states"], verdict["exports"], decoder(job.parent.tokenizer))
        said["facts"] = facts(job.parent, verdict["evaluation"], job.evaluation.source, verdict["statistics"])
    for index, step in enumerate(job.steps):
        stage, variant = job.made.get(index), step.variant or ""
        if stage is None:
            continue
        show_stage(said, variant, step.name, stage.path, stage.metrics)
        if counts := stage.metrics.get("overlap"):
            line = [f"{TEXT_OF[step.kind]} text", overlap.sentence(counts)]
            said["facts"] += [line] if line not in said["facts"] else []  # variants and stages share texts
        if step.kind == "train":
            said["facts"].append([step.label, trained(stage.metrics)])
        if rare := stage.metrics.get("without_statistics"):
            said["facts"].append([step.label, without_statistics(rare)])
    lines = job.run.summary()["stages"]
    said["stages"] = [{key: line[key] for key in KEPT} for line in lines]
    said["recipe"] = yaml.safe_dump(job.recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return said


def show_stage(said: dict[str, Any], label: str, name: str, folder: Path, metrics: dict[str, Any]) -> None:
    """Put what a stage left, its layers or its loss, into what a report shows under `label`."""
    table = folder / "layers.csv"
    if name == "calibrate" and table.is_file() and (found := gate.report.layers(table)):
        said["layers"][label] = found
    if kind(name) == "train" and metrics.get("loss"):
        several = "" if name == "train" else name  # one of several stages of training
        said["training"]["/".join(word for word in (label, several) if word)] = metrics["loss"]


def trained(metrics: dict[str, Any]) -> str:
    """How a stage of training went, and why it ended where it did not take all its steps."""
    steps, start, end = len(metrics["loss"]), metrics["kl_start"], metrics["kl_end"]
    said = f"{steps} steps; KL on held-out windows of the training text from {start:.5f} to {end:.5f}"
    if (tail := metrics.get("teacher_tail")) is not None:
        said += f"; trained on the parent's likeliest tokens, which leave out {tail:.2%} of its probability"
    if seconds := metrics.get("seconds_per_step"):
        ranks = metrics.get("ranks", 1)
        how = [f"{ranks} processes"] if ranks > 1 else []
        words = (("sharded", "weights split over them"), ("cuda_graph", "CUDA graph"), ("compiled", "compiled"))
        how += [word for key, word in words if metrics.get(key)]
        said += f"; {seconds:.3g} s a step" + (f" ({', '.join(how)})" if how else "")
    return said + (f"; ended early: {metrics['ended']}" if metrics["ended"] else "")


def without_statistics(names: Sequence[str]) -> str:
    """What calibration did to linears that too few tokens came to."""
    named = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more (layers.csv)" if len(names) > NAMED else "")
    return f"fewer than {FEW_TOKENS} tokens came to {named}: rounded to nearest at the widest range"


def facts(
    parent: Any, evaluation: dict[str, Any] | None, source: str = "", statistics: dict[str, Any] | None = None
) -> list[list[str]]:
    """Lines for the head of a report."""
    name = parent.name + (f" (revision {parent.revision})" if parent.revision else "")
    found = [["parent", name]]
    if evaluation:
        count, length = evaluation["num_windows"], evaluation["length"]
        text = f"{count} windows of {length} tokens of {Path(source).name}, {evaluation['num_tokens']:,} predicted"
        found += [["text", text], ["computed", f"{evaluation['dtype']} on {evaluation['device']}"]]
    if statistics:
        draws = f"{statistics['confidence']:.3g}, from {statistics['resamples']:,} bootstrap draws of the windows"
        found += [["confidence", draws]]
    return [*found, ["made by", f"Tare {__version__}"]]


def decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """Token ids to text; a token that is no whole letter by itself shows its name in the vocabulary."""

    def decode(ids: list[int]) -> str:
        text = tokenizer.decode(ids)
        if len(ids) == 1 and "\ufffd" in text:
            return str(tokenizer.convert_ids_to_tokens(ids)[0])
        return str(text)

    return decode
