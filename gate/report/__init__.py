"""One HTML page that says what was measured: no script, no network, light and dark, phone and print.

`write` makes NAME.html and NAME.json; every number of the page is one of the JSON file, at the JSON pointer that its
`data-path` gives. What is in it:

    title, status         of the run; status is null in a comparison
    facts                 [[name, text]]: parent, text, precision...
    evaluation, table, tasks, latency, exports, statistics   as in verdict.json (gate/stage); a comparison's exports: {}
    spread                state -> {quantiles, edges, counts} of the KL of single tokens, or null
    worst                 state -> [{kl, nll, parent_nll, window, position, context, next, top, parent_top}] with text
    pairs                 of a comparison: KL of each state less that of the best one, {state, best, value, low, high}
    layers                variant -> {before, after (columns of layers.csv), output, rows: [{layer, what was done to it,
                          its error after each step, seconds}]}
    training              variant -> loss of each step
    stages                [{name, variant, key, reused, seconds, peak_rss_gb, peak_gpu_gb}]
    recipe                YAML text, or null
    notes                 sentences on what could not be shown
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from gate._bootstrap import Sampling, interval
from gate.report._charts import charts
from gate.stage._content import write_json
from gate.stage.table import COLUMNS, LATENCY, TASKS

# columns of layers.csv, the first pair that is there: error before, error after, whether of the linear's output
ERRORS = (
    ("weighted_error_plain", "weighted_error", True),
    ("weighted_error_rtn", "weighted_error", True),
    ("error_rtn", "error", False),
)
TABLES = (  # key of the data, heading, columns, how to read it
    (
        "tasks", "Tasks", TASKS,
        "The gain over the parent, question by question, with its confidence interval.",
    ),
    (
        "latency", "Served", LATENCY,
        "By the engine's own benchmark, parent and exports in turn. Batch: requests at once. Ratios: geometric means "
        "over pairs of export / parent. GB: the weights on the GPU, or on a CPU all that the engine's processes hold.",
    ),
)  # fmt: skip
SCORES = ("score", "gain", "gain_low", "gain_high")  # of a task, in the CSV
WORST = 3  # positions shown of each state
LAYER = (  # of a row of `layers`: key, heading, format
    ("layer", "linear", ""), ("format", "format", ""), ("range", "range", ""), ("round", "round", ""),
    ("treatment", "instead", ""), ("before", "nearest", ".3g"), ("transformed", "transform, nearest", ".3g"),
    ("ranged", "and range", ".3g"), ("after", "and round", ".3g"), ("seconds", "seconds", ".2f"),
)  # fmt: skip
MOST_LAYERS = 1000  # rows of the table of a page; mixtures of experts have tens of thousands


def empty(title: str) -> dict[str, Any]:
    """A report in which nothing was measured yet."""
    return {
        "schema": 1, "title": title, "status": None, "facts": [], "evaluation": None, "table": [], "tasks": [],
        "latency": [], "exports": {}, "statistics": None, "spread": {}, "worst": {}, "pairs": [], "layers": {},
        "training": {}, "stages": [], "recipe": None, "notes": [],
    }  # fmt: skip


def write(folder: Path, name: str, data: Mapping[str, Any]) -> Path:
    """Write NAME.html and NAME.json into `folder`; gives the page. data: see above."""
    write_json(folder / f"{name}.json", data)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    page = environment.get_template("page.html.j2").render(
        data=data,
        charts=list(charts(dict(data))),
        columns=_columns(data["table"]),
        tables=[(key, *words) for key, *words in TABLES if data[key]],
        json_name=f"{name}.json",
        layer_tables=[(label, found["rows"][:MOST_LAYERS], found) for label, found in data["layers"].items()],
        layer_columns=LAYER,
    )
    path = folder / f"{name}.html"
    path.write_text(page, encoding="utf-8")
    return path


def _columns(table: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str, float]]:
    """(key of the row, heading, format, factor) of the columns that have any value."""
    found = []
    for key, heading, spec in COLUMNS:
        source, factor = ("size_on_disk", 1e-6) if key == "megabytes" else (key, 1.0)
        if any(row.get(source) not in (None, "") for row in table):
            found.append((source, heading, spec, factor))
    return found


def csv_text(table: Sequence[Mapping[str, Any]], tasks: Sequence[Mapping[str, Any]] = ()) -> str:
    """The table of all states as CSV, full precision; of each row of `tasks` tasks.NAME.score, .gain and its ends."""
    out, rows = io.StringIO(), {row["state"]: dict(row) for row in table}
    for one in tasks:
        rows[one["state"]] |= {f"tasks.{one['task']}.{key}": one[key] for key in SCORES}
    columns = dict.fromkeys(key for row in rows.values() for key in row)
    writer = csv.DictWriter(out, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows.values())
    return out.getvalue()


def measured(
    states: Mapping[str, Mapping[str, Any]], shown: Collection[str], decode: Callable[[list[int]], str]
) -> dict[str, Any]:
    """`spread` of all and `worst` of the `shown` ones of what `gate.stage.measure_all` gave. decode: ids to text."""
    spread, worst = {}, {}
    for name, state in list(states.items())[1:]:
        if state["same_as"]:
            continue
        spread[name] = state["token_kl"]
        if name in shown:
            worst[name] = [_readable(one, decode) for one in state["worst"][:WORST]]
    return {"spread": spread, "worst": {name: listed for name, listed in worst.items() if listed}}


def pairs(states: Mapping[str, Mapping[str, Any]], sampling: Sampling) -> list[dict[str, Any]]:
    """KL of each candidate less that of the one with the least, with the interval of their difference on each window.

    states: the parent first. Empty for fewer than two candidates with finite numbers.
    """
    finite = {name: state for name, state in list(states.items())[1:] if state["kl"] is not None}
    if len(finite) < 2:
        return []
    best = min(finite, key=lambda name: finite[name]["kl"])
    found = []
    for name, state in finite.items():
        if name != best:
            tokens = state["num_tokens"] / len(state["windows"]["kl"])
            windows = zip(state["windows"]["kl"], finite[best]["windows"]["kl"], strict=True)
            more = interval([(ours - theirs) / tokens for ours, theirs in windows], sampling)
            found.append({"state": name, "best": best, "value": more.value, "low": more.low, "high": more.high})
    return sorted(found, key=lambda pair: pair["value"])


def _readable(one: Mapping[str, Any], decode: Callable[[list[int]], str]) -> dict[str, Any]:
    tops = {key: [[decode([int(token)]), share] for token, share in one[key]] for key in ("top", "parent_top")}
    return {**one, **tops, "context": decode(one["context"]), "next": decode([one["next"]])}


def layers(path: Path) -> dict[str, Any] | None:
    """What a report shows of a layers.csv and the seconds.csv beside it; None when it has no errors to show."""
    rows, times = _rows_of(path), _rows_of(path.with_name("seconds.csv"))
    seconds = {row["layer"]: float(row["range"]) + float(row["round"]) for row in times}
    for before, after, output in ERRORS:
        if rows and all(row.get(before) and row.get(after) for row in rows):
            steps = {"before": before, "transformed": f"{after}_rtn", "ranged": f"{after}_range", "after": after}
            listed = [
                {key: row.get(key, "") for key in ("layer", "format", "range", "round", "treatment")}
                | {step: float(row[column]) if row.get(column) else None for step, column in steps.items()}
                | {"seconds": seconds.get(row["layer"])}
                for row in rows
            ]
            return {"before": before, "after": after, "output": output, "rows": listed}
    return None


def _rows_of(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))
