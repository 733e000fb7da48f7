"""The gate as a stage: lint every exported directory, measure every state, judge the thresholds, write verdict.json.

qat/pipeline.py calls these in order. Measurements are remembered by content (config, tensors, text, parent), thresholds
are judged every time. verdict.json:

    schema      1
    status      the worst of its exports: refused, anomalous, inconclusive, released
    exports     name -> {path (relative to verdict.json), format, status, released,
                faults: [{kind, where, what, rule, way_out, text}], anomalies: [sentence],
                checks: [{name, value, bound, passed, text, outcome, low, high, examples, needed}]}
    checks      the checks of all exports in one list, each with its `export`
    statistics  {confidence, resamples, seed, max_gain, max_parent_perplexity}: how the intervals were made
    table       one row a state: {state, format, perplexity, kl, kl_stderr, top1, accuracy (the mean over tasks),
                perplexity_recovered, kl_recovered, size_on_disk, bits_per_weight, bits_per_parameter, seconds, note};
                null where there is no number
    tasks       one row a task and state: {state, task, metric, examples, score, gain over the parent, gain_low,
                gain_high}
    latency     what the engine's own benchmark measured, one row a state and batch: {state, batch, memory_gb,
                first_token_ms, inter_token_ms, tokens_per_s, and of the parent's: first_token_ratio, inter_token_ratio,
                throughput_ratio with _low and _high, note}
    evaluation  {fingerprint, num_windows, length, num_tokens, vocabulary, dtype, device}
    states      name -> the measurement with sums per window ({nll, kl, top1}), for paired statistics; the spread of the
                KL of single tokens; the positions where it is largest

gate/verdict.schema.json is its JSON schema.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gate import _examples, _generate, _measure, lint
from gate.readers import Export
from gate.stage import _latency, _tasks
from gate.stage._content import digest, effective, files_key, fingerprint, remember, remembered
from gate.stage._state import State, artifact_state, dynamic_inputs, dynamic_quant, plain_state
from gate.stage._tasks import texts as task_texts
from gate.stage._verdict import Exported, problems, verdict
from qat import report
from qat.checkpoint import Tensors
from qat.model import Model
from qat.scheme import Section
from qat.tokens import fingerprint as text_fingerprint

__all__ = [
    "Exported",
    "State",
    "artifact_state",
    "dynamic_inputs",
    "dynamic_quant",
    "inspect",
    "inspect_all",
    "measure_all",
    "measure_latency",
    "measure_tasks",
    "plain_state",
    "problems",
    "task_texts",
    "verdict",
]


def inspect_all(
    exports: Sequence[Exported], gate: Mapping[str, Section], cache: Path
) -> tuple[dict[str, list[dict[str, Any]]], list[State]]:
    """The faults of each export by name (none are looked for without `lint`), and those to measure: without faults."""
    faults = {e.name: inspect(e, cache) if "lint" in gate else [] for e in exports}
    sound = [e for e in exports if not faults[e.name]]
    return faults, [plain_state(e.name, e.directory, e.key, baseline=e.baseline, seconds=e.seconds) for e in sound]


def inspect(export: Exported, cache: Path) -> list[dict[str, Any]]:
    """The faults that lint finds in an exported directory, as JSON; remembered while no file of it changes."""
    source = files_key(export.artifact.path) if export.artifact else None
    key = digest(lint.VERSION, export.key, files_key(export.directory), source, sorted(export.engines))
    found: list[dict[str, Any]] = remembered(
        cache,
        "lint",
        key,
        lambda: [fault.as_dict() for fault in lint.check(export.directory, export.engines, export.artifact)],
    )
    return found


def measure_all(
    parent: State,
    states: Sequence[State],
    windows: Tensor,
    cache: Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    progress: _measure.Progress | None = None,
) -> dict[str, Any]:
    """{"evaluation": ..., "states": name -> measurement, the parent first}, for JSON.

    The parent is run once for all states that are not remembered. A state whose tensors, config and quantized inputs
    all equal those of an earlier one has the same numbers and is not run again; `same_as` names that one.
    """
    every = [parent, *states]
    if len({state.name for state in every}) < len(every):
        raise ValueError(f"states to measure need different names, got {[state.name for state in every]}")
    text, device_type = text_fingerprint(windows), torch.device(device).type
    content = {state.name: _content(state, cache) for state in every}
    setting = (_measure.VERSION, content[parent.name], text, str(dtype), device_type)
    keys = {name: digest(*setting, value) for name, value in content.items()}
    first = {content[state.name]: state for state in reversed(every)}
    known = {key: remembered(cache, "measure", key) for key in keys.values()}
    todo = [s for s in states if first[content[s.name]] is s and known[keys[s.name]] is None]
    if todo or known[keys[parent.name]] is None:
        models = {state.name: state.model(device, dtype) for state in todo}
        store = cache / f"hidden-{digest(*setting)}"
        own, others = _measure.measure_many(parent.model(device, dtype), models, windows, progress, store=store)
        for name, measurement in {parent.name: own, **others}.items():
            known[keys[name]] = measurement.as_dict()
            remember(cache, "measure", keys[name], known[keys[name]])
    out: dict[str, dict[str, Any]] = {}
    for state in every:
        numbers, same = known[keys[state.name]], first[content[state.name]]
        out[state.name] = {
            **numbers,
            "measure_seconds": numbers["seconds"],
            "seconds": state.seconds,
            "format": state.format,
            "fingerprint": content[state.name],
            "same_as": None if same is state else same.name,
            "baseline": state.baseline,
            **_sizes(state.tensors),
        }
    evaluation = {
        "fingerprint": text,
        "num_windows": len(windows),
        "length": windows.shape[1],
        "num_tokens": out[parent.name]["num_tokens"],
        "vocabulary": parent.config.vocab_size,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device_type,
    }
    return {"evaluation": evaluation, "states": out}


def examples_of(options: Section, tokenizer: Any, config: Any) -> dict[str, Any]:
    """The examples of each offline task. options: of gate/tasks.py. config: the parent's.

    Raises ValueError with the first thing wrong in each file.
    """
    asked, longest = options.model_dump(), getattr(config, "max_position_embeddings", None)
    found, wrong = dict[str, Any](), list[str]()
    for name, path in asked["offline"].items():
        try:
            found[name] = _examples.read(Path(path), tokenizer, asked["limit"], longest)
        except ValueError as error:
            wrong.append(f"gate.tasks.offline.{name}: {error}")
    if wrong:
        raise ValueError("\n".join(wrong))
    return found


def measure_tasks(
    measured: dict[str, Any],
    states: Sequence[State],
    tokenizer: Any,
    options: Section,
    cache: Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> None:
    """Put `tasks` into the measurements of `measure_all`. states: the parent first. options: of gate/tasks.py.

    Raises ValueError for a file of examples that cannot be read, and without lm-eval when tasks of it are asked for.
    """
    asked, parent = options.model_dump(), states[0]
    offline = examples_of(options, tokenizer, parent.config)

    def make(state: State) -> Callable[[bool], Model]:
        return lambda resident: state.model(device, dtype, resident)

    total = len(states) * sum(map(_tasks.num_requests, offline.values()))
    with report.Steps("tasks", total=total, unit="request") as steps:
        found = _tasks.measure(
            {state.name: make(state) for state in states},
            {state.name: measured["states"][state.name]["fingerprint"] for state in states},
            offline,
            asked["lm_eval"],
            asked["limit"],
            tokenizer,
            _generate.ends(parent.folder, parent.config, tokenizer) if offline else [],
            cache,
            device,
            dtype,
            steps.advance,
        )
    for name, tasks in found.items():
        measured["states"][name]["tasks"] = tasks


def measure_latency(
    measured: dict[str, Any], folders: Mapping[str, Path], dtype: str, options: Section, progress: _latency.Progress
) -> None:
    """Put `latency` into the measurements of `measure_all`. folders: of what is served, the parent's first.

    dtype: to serve in. options: of gate/latency.py. Raises ValueError when the engine does not serve the parent.
    """
    for name, found in _latency.measure(folders, dtype, options.model_dump(), progress).items():
        measured["states"][name]["latency"] = found


def _content(state: State, cache: Path) -> str:
    """The fingerprint of a state, which means reading all of it; remembered while no file of it changes."""
    unread = digest(state.key, state.format, effective(state.config), files_key(state.folder))
    found: str = remembered(
        cache,
        "content",
        unread,
        lambda: fingerprint(state.config, state.tensors, state.input_quant, state.cache_scales),
    )
    return found


def _sizes(tensors: Tensors) -> dict[str, float | None]:
    if not isinstance(tensors, Export):  # an artifact is not a format that anything serves
        return {"size_on_disk": None, "bits_per_weight": None, "bits_per_parameter": None}
    return {
        "size_on_disk": tensors.size_on_disk,
        "bits_per_weight": tensors.bits_per_weight,
        "bits_per_parameter": tensors.bits_per_parameter,
    }
