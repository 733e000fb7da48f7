"""The charts of a report, from its data (see `gate.report`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from gate.report import _svg as svg

LOG_RATIO = 20  # numbers that differ more than this go on a logarithmic scale
NO_LEGEND = Markup("")
ROW, BAR = 34, 12  # height of a row of bars, and of its bar
CURVES = 8  # more series than this cannot be told apart
QUALITIES = {  # key of a row: its name, its axis, how it is written, how to read the chart
    "kl": (
        "KL", "KL to the parent (nats per token)", ".5f",
        "Lower and further left is better. Bars are confidence intervals.",
    ),
    "accuracy": ("Accuracy", "mean score over tasks", ".3f", "Higher and further left is better."),
}  # fmt: skip
BOTTOM = svg.HEIGHT - svg.BOTTOM
FIT = (svg.LEFT + 4, svg.WIDTH - svg.RIGHT), (BOTTOM, svg.TOP)  # pixels of x and of y


@dataclass(frozen=True)
class Chart:
    """title: what it shows. note: how to read it."""

    title: str
    note: str
    body: Markup
    legend: Markup = NO_LEGEND


def charts(data: dict[str, Any]) -> Iterator[Chart]:
    """Those for which `data` has numbers."""
    for kind in QUALITIES:
        for make in (_tradeoff, _latency):
            if chart := make(data, kind):
                yield chart
    for make_one in (_stages, _spread):
        if chart := make_one(data):
            yield chart
    for label, layers in data["layers"].items():
        if len(layers["rows"]) > 1:
            yield _layers(label, layers)
    if data["training"]:
        yield _training(data["training"])


def _rows(data: dict[str, Any], *keys: str, parent: bool = False) -> list[tuple[int, dict[str, Any]]]:
    """(place in the table, row) of the rows, the parent's only when asked for, that have all of these numbers."""
    rows = list(enumerate(data["table"]))[0 if parent else 1 :]
    return [(i, row) for i, row in rows if all(row.get(key) is not None for key in keys)]


def _tradeoff(data: dict[str, Any], kind: str) -> Chart | None:
    key = "bits_per_weight"
    rows = _rows(data, kind, key, parent=kind != "kl")
    return _against(kind, "size", "bits per weight", [(row, i, row[key], f"/table/{i}/{key}") for i, row in rows])


def _latency(data: dict[str, Any], kind: str) -> Chart | None:
    """Of the smallest batch, in which the weights that are read decide."""
    key, least = "inter_token_ratio", min((row["batch"] for row in data["latency"] if row["batch"]), default=0)
    table = {row["state"]: (i, row) for i, row in _rows(data, kind)}
    found = []
    for n, served in enumerate(data["latency"]):
        if served["batch"] == least and served[key] is not None and served["state"] in table:
            i, row = table[served["state"]]
            found.append((row, i, served[key], f"/latency/{n}/{key}"))
    return _against(kind, "latency", f"time between tokens, batch {least}, of the parent's", found)


def _against(kind: str, title: str, what: str, found: list[tuple[dict[str, Any], int, float, str]]) -> Chart | None:
    """KL or accuracy of each (row of the table, its place, number, pointer to the number) against the number."""
    if not found:
        return None
    name, axis, spec, note = QUALITIES[kind]
    low, high = f"{kind}_low", f"{kind}_high"
    values = [row[kind] for row, *_ in found]
    log = kind == "kl" and min(values) > 0 and max(values) > LOG_RATIO * min(values)
    x = svg.scale([value for _, _, value, _ in found], *FIT[0])
    ends = [row[end] for row, *_ in found for end in (kind, low, high) if row.get(end) is not None]
    y = svg.scale(ends, *FIT[1], log=log, zero=kind == "kl")
    parts, places = [svg.axes(x, y, what, axis)], []
    for row, i, value, pointer in found:
        at = x(value), y(row[kind])
        if row.get(low) is not None:
            parts.append(svg.whisker(y(max(row[low], y.low)), y(row[high]), at[0], horizontal=False))
        said = f"{row['state']}: {value:.3f} {what}, {name} {row[kind]:{spec}}"
        parts.append(svg.mark(*at, 0, said, f"{pointer} /table/{i}/{kind}"))
        places.append((*at, row["state"]))
    parts.append(svg.labels(places, BOTTOM))
    return Chart(f"{name} against {title}", note, svg.frame(f"{name} against {title}", parts))


def _stages(data: dict[str, Any]) -> Chart | None:
    found = _rows(data, "kl")
    if not found:
        return None
    height = svg.TOP + ROW * len(found) + svg.BOTTOM
    most = [row[end] for _, row in found for end in ("kl", "kl_high") if row[end] is not None]
    x = svg.scale([0.0, *most], 12, svg.WIDTH - svg.RIGHT - 8, zero=True)
    parts, bottom = [], height - svg.BOTTOM
    for tick in x.ticks():
        grid = Markup('<line class="grid" x1="{:.1f}" x2="{:.1f}" y1="{}" y2="{}"/>')
        parts.append(grid.format(x(tick), x(tick), svg.TOP, bottom))
        parts.append(svg.text(x(tick), bottom + 15, svg.number(tick), "tick", "middle"))
    parts.append(svg.text(svg.WIDTH / 2, height - 6, "KL to the parent (nats per token)", "name", "middle"))
    variants = list(dict.fromkeys(row["state"].rpartition("/")[0] for _, row in found))
    for place, (i, row) in enumerate(found):
        top, series = svg.TOP + ROW * place, variants.index(row["state"].rpartition("/")[0])
        won = "" if row["kl_recovered"] is None else f", {row['kl_recovered']:z.1%} won back"
        parts.append(svg.text(x(0), top + 12, f"{row['state']}  {row['kl']:.5f}{won}"))
        said = f"{row['state']}: KL {row['kl']:.5f}"
        parts.append(svg.bar(x(0), x(row["kl"]), top + 16, BAR, series, said, f"/table/{i}/kl"))
        if row["kl_low"] is not None:
            parts.append(svg.whisker(x(max(row["kl_low"], 0)), x(row["kl_high"]), top + 16 + BAR / 2))
    note = "What each stage lost or won back, against round-to-nearest (rtn) where that was measured."
    return Chart("KL stage by stage", note, svg.frame("KL stage by stage", parts, height))


def _spread(data: dict[str, Any]) -> Chart | None:
    alike = {tuple(spread["counts"]): name for name, spread in reversed(data["spread"].items()) if spread}
    shown = {name: data["spread"][name] for name in reversed(alike.values())}
    if not shown:
        return None
    names = list(shown)[:CURVES]
    curves = {}
    for name in names:
        edges, counts = shown[name]["edges"], shown[name]["counts"]
        total = sum(counts)
        above = [sum(counts[k + 1 :]) / total for k in range(len(edges))]
        curves[name] = [(e, share) for e, share in zip(edges, above, strict=True) if share > 0 and e >= 1e-5]
    x = svg.scale([e for points in curves.values() for e, _ in points], *FIT[0], log=True)
    y = svg.Scale(0, 100, *FIT[1])
    parts = [svg.axes(x, y, "KL of one token (nats)", "tokens above it (%)")]
    for series, (name, points) in enumerate(curves.items()):
        parts.append(svg.line([(x(e), y(100 * share)) for e, share in points], series, name))
    more = f" The first {CURVES} of {len(shown)}." if len(shown) > CURVES else ""
    note = "How many tokens differ by more than so much: a long tail to the right is a few tokens gone wrong." + more
    title = "KL of single tokens"
    return Chart(title, note, svg.frame(title, parts), svg.legend(names, lines=True))


def _layers(label: str, layers: dict[str, Any]) -> Chart:
    rows, keys = layers["rows"], [key for key in ("before", "after") if layers[key]]
    values = [row[key] for row in rows for key in keys if row[key]]
    x, y = svg.scale([0, len(rows) - 1], *FIT[0], whole=True), svg.scale(values, *FIT[1], log=True)
    parts = [svg.axes(x, y, "linears, in the order they run", "relative squared error")]
    for series, key in enumerate(keys):
        points = {n: (x(n), y(row[key])) for n, row in enumerate(rows) if row[key]}
        parts.append(svg.line(list(points.values()), series))
        for n, at in points.items():
            said = f"{rows[n]['layer']}: {rows[n][key]:.3g} {key}"
            parts.append(svg.mark(*at, series, said, f"/layers/{_escaped(label)}/rows/{n}/{key}", small=True))
    title = f"Error of each linear{f', {label}' if label else ''}"
    named = {"before": "round to nearest", "after": "as stored"}
    note = f"Error of its output (column {layers['after']} of layers.csv)." if layers["output"] else (
        f"Error of its weights (column {layers['after']} of layers.csv)."
    )  # fmt: skip
    return Chart(title, note, svg.frame(title, parts), svg.legend([named[key] for key in keys]))


def _training(training: dict[str, list[float]]) -> Chart:
    curves = {name: losses for name, losses in list(training.items())[:CURVES] if losses}
    values = [loss for losses in curves.values() for loss in losses]
    log = min(values) > 0 and max(values) > LOG_RATIO * min(values)
    x = svg.scale([1, max(map(len, curves.values()))], *FIT[0], whole=True)
    y = svg.scale(values, *FIT[1], log=log)
    parts = [svg.axes(x, y, "step", "training loss per token")]
    for series, (name, losses) in enumerate(curves.items()):
        parts.append(svg.line([(x(n), y(loss)) for n, loss in enumerate(losses, 1)], series, name))
    note = "The loss of each step's own batch, which differs from batch to batch."
    legend = svg.legend([name or "train" for name in curves], lines=True)
    return Chart("Training", note, svg.frame("Training", parts), legend if len(curves) > 1 else NO_LEGEND)


def _escaped(part: str) -> str:
    """A key as part of a JSON pointer (RFC 6901)."""
    return part.replace("~", "~0").replace("/", "~1")
