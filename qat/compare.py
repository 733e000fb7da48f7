"""`tare compare`: runs and checkpoints, whoever made them, on the same text against one parent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gate.report
import gate.stage
from gate._bootstrap import Sampling
from gate.stage import table
from gate.tasks import Options
from qat import arguments, context, manifest, questions, report, results, summary
from qat.arguments import RecipeError
from qat.index import checkpoints_below
from qat.job import device, dtype
from qat.parent import Parent, open_parent
from qat.sections import TEXT_FILES, Compute, EvaluationText
from qat.tokens import Corpus, windows

REPORT, MEASURED, PARENTS = "compare", ".measured", ".parents"


@dataclass(frozen=True)
class Choices:
    """What the command line says; None is taken from the first run. parent: as model.source.

    tasks: NAME=FILE of examples. lm_eval: names of tasks. limit: the first so many examples of each; None takes all.
    """

    parent: str | None = None
    text: str | None = None
    sequences: int | None = None
    length: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    tasks: Sequence[str] = ()
    lm_eval: Sequence[str] = ()
    limit: int | None = None


@dataclass(frozen=True)
class Ran:
    """The folder of a run, with what its manifests say. made: of its stages, by key. verdict: {} without a gate."""

    folder: Path
    summary: dict[str, Any]
    made: dict[str, dict[str, Any]]
    verdict: dict[str, Any]

    @property
    def recipe(self) -> dict[str, Any]:
        return next(iter(self.made.values()))["recipe"]

    @property
    def inputs(self) -> dict[str, Any]:
        return next(iter(self.made.values()))["inputs"]


def main(sources: list[str], choices: Choices, out: Path) -> Path:
    """Measure, print the table, write compare.html, .json and .csv into `out`; gives the page.

    Raises RecipeError for what the command line lacks and for sources that are neither a run nor a checkpoint, all at
    once; ValueError for what cannot be compared.
    """
    runs, folders, wrong = _sources(sources)
    asked, faults = questions.asked(choices.tasks, choices.lm_eval, choices.limit)
    wrong += [*_lacking(runs, choices), *faults]
    if wrong and not (asked.offline and _is_here(runs, choices)):
        raise _refused(wrong)
    try:
        parent = _parent(runs, choices, out)
        wrong += questions.unreadable(asked, parent)
    except ValueError as error:
        if not wrong:
            raise
        wrong.append(str(error))
    if wrong:
        raise _refused(wrong)
    corpus = _text(runs, choices, parent)
    on = device(Compute(device=choices.device))
    precision = dtype(Compute(dtype=choices.dtype), on)
    states = [gate.stage.plain_state(name, folder) for name, folder in folders.items()]
    own = gate.stage.plain_state("parent", parent.folder)
    cache = (next(iter(runs.values())).folder.parent if runs else out) / MEASURED
    with report.Steps("compare", total=(1 + len(states)) * len(corpus.windows), unit="window") as steps:
        found = gate.stage.measure_all(own, states, corpus.windows, cache, on, precision, steps.reach)
    if asked.offline or asked.lm_eval:
        gate.stage.measure_tasks(found, [own, *states], parent.tokenizer, asked, cache, on, precision)
    said = _data(runs, parent, corpus, found, asked)
    report.say(table.text(said["table"]))
    if said["tasks"]:
        report.say(table.text(said["tasks"], table.TASKS))
    for line in verdicts(said["pairs"]):
        report.say(line)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{REPORT}.csv").write_text(gate.report.csv_text(said["table"], said["tasks"]), encoding="utf-8")
    page = gate.report.write(out, REPORT, said)
    report.say(f"report: {page}")
    return page


def verdicts(pairs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A sentence for each candidate but the best one, or for several of which the same is to be said."""
    alike = dict[tuple[Any, ...], list[str]]()
    for pair in pairs:
        alike.setdefault((pair["best"], pair["value"], pair["low"], pair["high"]), []).append(pair["state"])
    for (best, value, low, high), states in alike.items():
        if value == 0 and low in (0, None) and high in (0, None):
            yield f"{', '.join(states)}: KL as {best}"
            continue
        between = "" if low is None else f" (between {low:+.5f} and {high:+.5f})"
        unsure = "; too few windows to tell them apart" if low is not None and low <= 0 else ""
        yield f"{', '.join(states)}: KL {value:+.5f} against {best}{between}{unsure}"


def _refused(wrong: list[str]) -> RecipeError:
    return RecipeError("nothing was compared:\n" + "\n".join(f"  {line}" for line in wrong))


def _lacking(runs: dict[str, Ran], choices: Choices) -> Iterator[str]:
    if choices.parent is None and not runs:
        yield "checkpoints alone do not say what they are compared with: give --parent"
    if choices.text is None and not any(ran.recipe["data"]["evaluation"] for ran in runs.values()):
        yield "no text to compare on: give --text, or a run that has evaluation text"
    for option, value, files in (("parent", choices.parent, {".gguf"}), ("text", choices.text, TEXT_FILES)):
        is_path = value is not None and (value.startswith(("/", ".", "~")) or Path(value).suffix in files)
        if value is not None and is_path and arguments.locate(value, Path()) is None:
            yield f"--{option} {value} does not exist"


def _sources(sources: list[str]) -> tuple[dict[str, Ran], dict[str, Path], list[str]]:
    """The runs by name, every checkpoint to measure by name, and what is wrong with the other sources."""
    runs, folders, wrong = dict[str, Ran](), dict[str, Path](), list[str]()
    paths = {source: Path(source).expanduser() for source in sources}
    for source, path in paths.items():
        if (path / summary.FILE).is_file():
            try:
                ran = _ran(path)
            except ValueError as error:
                wrong.append(str(error))
                continue
            name = _unused(path.resolve().name, runs)
            runs[name] = ran
            exports = {key: (path / one["path"]).resolve() for key, one in ran.summary["exports"].items()}
            if not exports:
                wrong.append(f"{path} has no exports (status {ran.summary['status']}); finish that run first")
            several = len(sources) > 1
            folders |= {(f"{name}/{key}" if several else key): folder for key, folder in exports.items()}
        elif (path / "config.json").is_file():
            folders[_unused(path.resolve().name, folders)] = path
        elif not path.exists():
            wrong.append(f"{source} does not exist")
        else:
            below = ", ".join(map(str, checkpoints_below(path)))
            wrong.append(
                f"{source} is neither the folder of a run ({summary.FILE}) nor a checkpoint (config.json)"
                + (f"; checkpoints lie below: give one or more of {below}" if below else "")
            )
    return runs, folders, wrong


def _unused(name: str, taken: Any) -> str:
    names = (name, *(f"{name}-{n}" for n in range(2, len(taken) + 3)), "")
    return next(one for one in names if one not in taken and one != "parent")


def _ran(path: Path) -> Ran:
    """The run in a folder. Raises ValueError when it did not get as far as a stage, or its files are not a run's."""
    said = summary.read(path)
    made = {stage["key"]: manifest.read(path / stage["path"]) for stage in said["stages"]}
    whole = {key: found for key, found in made.items() if found is not None}
    if not whole:
        raise ValueError(f"{path} has none of the stages that its {summary.FILE} names; run the recipe again")
    verdict = manifest.read_json(path / said["verdict"]) if said["verdict"] else {}
    return Ran(path, said, whole, verdict)


def _is_here(runs: dict[str, Ran], choices: Choices) -> bool:
    """Whether nothing must be fetched or converted to have the parent; for a command with faults neither is done."""
    sources = [choices.parent] if choices.parent is not None else [_model(ran)["source"] for ran in runs.values()]
    return any(source in arguments.KEYWORDS or Path(source).expanduser().is_dir() for source in sources[:1])


def _model(ran: Ran) -> dict[str, Any]:
    model = ran.recipe["model"]
    return {**model, "source": arguments.locate(model["source"], ran.folder) or model["source"]}


def _parent(runs: dict[str, Ran], choices: Choices, out: Path) -> Parent:
    if choices.parent is not None:
        cache = out / PARENTS
        try:
            return open_parent(choices.parent, None, False, cache)
        except ValueError as error:
            raise ValueError(str(error).replace("model.source", "--parent", 1)) from error
    (first, ran), *others = runs.items()
    for name, other in others:
        if other.inputs["parent"] != ran.inputs["parent"]:
            raise ValueError(f"the runs {first} and {name} have different parents; choose one with --parent")
    model = _model(ran)
    return open_parent(model["source"], model["revision"], model["trust_remote_code"], ran.folder.parent / PARENTS)


def _text(runs: dict[str, Ran], choices: Choices, parent: Parent) -> Corpus:
    known = [ran.recipe["data"]["evaluation"] for ran in runs.values() if ran.recipe["data"]["evaluation"]]
    text: dict[str, Any] = dict(known[0]) if known else {"length": 1024, "sequences": None}
    if choices.text is not None:
        text = {key: text[key] for key in ("length", "sequences")} | {"source": choices.text}
    if choices.sequences or choices.length:
        text |= {"sequences": choices.sequences or text["sequences"], "length": choices.length or text["length"]}
    longest = getattr(parent.config, "max_position_embeddings", None)
    context.check_length(text["length"], longest, f"give --length {longest}")
    text["source"] = arguments.locate(text["source"], Path()) or text["source"]
    asked = EvaluationText.model_validate(text)
    return windows(parent.tokenizer, asked, asked.length, asked.sequences, asked.seed)


def _data(
    runs: dict[str, Ran], parent: Parent, corpus: Corpus, found: dict[str, Any], asked: Options
) -> dict[str, Any]:
    """What the report shows; see `gate.report`."""
    sampling, exports = Sampling(), list(found["states"])[1:]
    pairs = gate.report.pairs(found["states"], sampling)
    said, states = gate.report.empty("Comparison"), dict(found["states"])
    for name, ran in runs.items():
        prefix = f"{name}/" if len(runs) > 1 or len(exports) > len(ran.summary["exports"]) else ""
        if not (asked.offline or asked.lm_eval):
            _add_tasks(states, ran, prefix, said["notes"])
        elif others := [task for task in _tasks(ran) if task not in found["states"]["parent"]["tasks"]]:
            said["notes"].append(f"tasks that only {ran.folder.name} was asked are not shown: {', '.join(others)}")
        states = _with_stages(states, ran, prefix, found["evaluation"], said["notes"])
        said["latency"] += _latency(ran, prefix)
        for stage in ran.summary["stages"]:
            label = f"{prefix}{stage['variant'] or ''}".strip("/")
            results.show_stage(said, label, stage["name"], ran.folder / stage["path"], stage["metrics"])
    said |= {"evaluation": found["evaluation"], "pairs": pairs}
    said |= {"table": table.rows(states, {}, sampling), "tasks": table.tasks(states, sampling)}
    statistics: dict[str, Any] = {
        "confidence": sampling.confidence,
        "resamples": sampling.resamples,
        "seed": sampling.seed,
    }
    said["facts"] = results.facts(parent, found["evaluation"], corpus.source, statistics)
    if tasks := questions.sentence(asked):
        said["facts"].append(["tasks", tasks])
    return said | {"statistics": statistics} | gate.report.measured(states, exports, results.decoder(parent.tokenizer))


def _tasks(ran: Ran) -> dict[str, Any]:
    """What the gate of a run asked, by task, with the parent's answers."""
    found: dict[str, Any] = ran.verdict.get("states", {}).get("parent", {}).get("tasks", {})
    return found


def _add_tasks(states: dict[str, Any], ran: Ran, prefix: str, notes: list[str]) -> None:
    """Put what a run's exports and its parent answered into `states`, if all runs asked this parent the same."""
    of, parent, answered = ran.verdict.get("states", {}), states["parent"], _tasks(ran)
    if not answered:
        return
    if of["parent"]["fingerprint"] != parent["fingerprint"] or parent.get("tasks", answered) != answered:
        notes.append(f"{ran.folder.name} asked another parent, or other examples: its tasks are not shown")
        return
    parent["tasks"] = answered
    for name in ran.summary["exports"]:
        if prefix + name in states and "tasks" in of.get(name, {}):
            states[prefix + name]["tasks"] = of[name]["tasks"]


def _latency(ran: Ran, prefix: str) -> list[dict[str, Any]]:
    """What the run measured of its exports being served, against the parent on the same machine."""
    rows = ran.verdict.get("latency", [])  # runs of earlier versions have none
    return [{**row, "state": prefix + row["state"]} for row in rows if row["state"] in ran.verdict["exports"]]


def _with_stages(
    states: dict[str, Any], ran: Ran, prefix: str, evaluation: dict[str, Any], notes: list[str]
) -> dict[str, Any]:
    """`states` and, before its exports, what the run measured between stages, if that was on the same text."""
    verdict = ran.verdict
    if not verdict:
        return states
    if verdict["evaluation"] != evaluation or verdict["states"]["parent"]["nll"] != states["parent"]["nll"]:
        notes.append(f"{ran.folder.name} was measured on other text or in other precision: its stages are not shown")
        return states
    between = {
        f"{prefix}{name}": {**state, "baseline": state["baseline"] and prefix + state["baseline"]}
        for name, state in verdict["states"].items()
        if name != "parent" and name not in verdict["exports"]
    }
    for name in ran.summary["exports"]:
        of = verdict["states"].get(name)
        if of and prefix + name in states:
            states[prefix + name] |= {"baseline": of["baseline"] and prefix + of["baseline"]}
    return {"parent": states["parent"], **between, **{k: v for k, v in states.items() if k != "parent"}}
