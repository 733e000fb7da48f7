"""The page and the files for pipelines: every number is one of the JSON file, and nothing is fetched or run."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gate import divergence, lint, perplexity, report, stage
from gate._bootstrap import Sampling
from gate.report import _charts, _svg, pipelines
from gate.stage import Exported, table
from tests.judging import judge
from tests.page import Page, at, numbers

EVIL = '<script src="http://x.invalid/a.js">alert(1)</script>&"\'|`*'


@pytest.fixture(scope="module")
def data(made: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A report of two exports, with a name and texts that try to be HTML."""
    folder = tmp_path_factory.mktemp("report")
    parent = stage.plain_state("parent", made.parent)
    exports = [
        Exported("int4/awq", made.export("awq", "int4"), (), artifact=made.artifact("int4")),
        Exported(EVIL, made.export("compressed_tensors", "int4-asym"), (), artifact=made.artifact("int4-asym")),
    ]
    gate = {
        "lint": lint.Options(),
        "divergence": divergence.Options(max_kl=1e-6),
        "perplexity": perplexity.Options(max_relative_increase=9),
    }
    found = judge(folder / "verdict.json", parent, [], exports, made.windows, gate, folder / "cache")
    for n, state in enumerate(found["states"].values()):
        scores = [float((k + n) % 3 == 0) for k in range(9 + n // 2)]
        state["tasks"] = {EVIL: {"metric": "acc", "score": sum(scores) / len(scores), "scores": scores}}
    sampling = Sampling(resamples=1000)
    found |= {"table": table.rows(found["states"], {}, sampling), "tasks": table.tasks(found["states"], sampling)}
    said = report.empty("run " + EVIL) | {"status": found["status"], "facts": [["parent", EVIL]]}
    said |= {key: found[key] for key in ("evaluation", "table", "tasks", "exports", "statistics")}
    said |= report.measured(found["states"], found["exports"], lambda ids: f"{EVIL}{ids[:3]}\n")
    said["pairs"] = report.pairs(found["states"], sampling)
    said["training"] = {"int4": [0.4 / (n + 1) for n in range(20)]}
    lines = [f"l{n},{EVIL},max,nearest,{0.02 + n / 1000},,{0.01 + n / 2000}" for n in range(14)]
    (folder / "layers.csv").write_text("\n".join(["layer,treatment,range,round,error_rtn,error_range,error", *lines]))
    (folder / "seconds.csv").write_text("layer,range,round\nl3,1.25,0.5\n")
    said["layers"] = {"a/b": report.layers(folder / "layers.csv")}
    said["stages"] = [
        {"name": "calibrate", "variant": EVIL, "key": "abc", "reused": False, "seconds": 1.25, "peak_rss_gb": 0.5,
         "peak_gpu_gb": None}
    ]  # fmt: skip
    return {"verdict": found, "report": said, "folder": folder}


def test_every_number_of_the_page_is_in_the_json(data: dict[str, Any]) -> None:
    path = report.write(data["folder"], "report", data["report"])
    page, kept = Page(path.read_text(encoding="utf-8")), json.loads((data["folder"] / "report.json").read_text())
    assert kept == data["report"]
    shown = numbers(path)
    for row in range(3):
        wanted = {"perplexity", "kl", "top1", "accuracy", "size_on_disk", "bits_per_weight"}
        assert {f"/table/{row}/{key}" for key in wanted} <= shown
    assert any(path and path.startswith("/worst/") for path in shown) and "/pairs/0/value" in shown
    assert {"/tasks/0/score", "/tasks/1/gain", "/tasks/1/gain_low"} <= shown
    assert len(page.titles) > 20 and "/table/0/bits_per_weight /table/0/accuracy" in dict(page.titles)


def test_a_task_has_a_gain_where_the_same_number_of_questions_was_asked(data: dict[str, Any]) -> None:
    """By hand: 9 questions, of which the parent answers those divisible by 3, the first export the ones before them."""
    parent, first, second = data["report"]["tasks"]
    assert (parent["score"], parent["gain"], parent["examples"]) == (pytest.approx(3 / 9), None, 9)
    assert (first["score"], first["gain"]) == (pytest.approx(3 / 9), 0.0) and first["gain_low"] < 0 < first["gain_high"]
    assert (second["examples"], second["gain"], second["gain_low"]) == (10, None, None)
    assert [row["accuracy"] for row in data["report"]["table"]] == [row["score"] for row in data["report"]["tasks"]]


def test_texts_are_escaped_and_nothing_is_fetched(data: dict[str, Any]) -> None:
    text = report.write(data["folder"], "report", data["report"]).read_text(encoding="utf-8")
    page = Page(text)
    assert {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object"} == set()
    for tag, attrs in page.tags:
        assert not {"src", "href", "xlink:href"} & set(attrs) and not any(key.startswith("on") for key in attrs), tag
    assert "url(" not in text and "@import" not in text
    assert re.findall("https?://[^ \"<']+", text.replace("http://x.invalid/a.js", "")) == []
    assert text.count("<script") == 0 and text.count("&lt;script") > 5
    styles = text[: text.index("</style>")]
    for rule in ("prefers-color-scheme: dark", "@media print", 'name="viewport"'):
        assert rule in styles


def test_every_linear_has_a_row(data: dict[str, Any]) -> None:
    path = report.write(data["folder"], "report", data["report"])
    shown = {attrs["data-path"] for attrs, _ in Page(path.read_text(encoding="utf-8")).numbers}
    for n in range(14):
        assert {f"/layers/a~1b/rows/{n}/{key}" for key in ("before", "after")} <= shown
    assert "/layers/a~1b/rows/3/seconds" in shown and not any(str(one).endswith("/ranged") for one in shown)
    assert at(data["report"], "/layers/a~1b/rows/3/seconds") == 1.75


def test_a_page_without_a_gate(tmp_path: Path) -> None:
    text = report.write(tmp_path, "report", report.empty("x") | {"status": "ungated"}).read_text()
    assert "ungated" in text and "<table" not in text and "<figure" not in text


def test_csv_has_the_table_in_full_precision(data: dict[str, Any]) -> None:
    table = data["verdict"]["table"]
    rows = list(csv.DictReader(io.StringIO(report.csv_text(table))))
    assert [row["state"] for row in rows] == ["parent", "int4/awq", EVIL]
    assert [float(row["kl"]) for row in rows] == [row["kl"] for row in table]


def test_junit_and_markdown_say_what_the_verdict_says(data: dict[str, Any]) -> None:
    verdict = data["verdict"]
    assert verdict["status"] == "refused"
    pipelines.write(data["folder"], EVIL, verdict)
    root = ElementTree.parse(data["folder"] / "junit.xml").getroot()
    assert root.attrib == {"name": EVIL, "tests": "4", "failures": "2", "errors": "0"}
    for suite, (name, export) in zip(root, verdict["exports"].items(), strict=True):
        cases = {case.get("name"): case for case in suite}
        assert suite.get("name") == name and list(cases) == [check["name"] for check in export["checks"]]
        failure = cases["divergence.max_kl"].find("failure")
        assert failure is not None and failure.text == export["checks"][0]["text"]
        assert cases["perplexity.max_relative_increase"].find("failure") is None
    text = (data["folder"] / "summary.md").read_text(encoding="utf-8")
    assert text.startswith("## ❌ run".replace("run", pipelines.plain(EVIL)) + ": refused\n")
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in rows]
    assert len(rows) == 1 + len(verdict["table"]) and len({len(line) for line in cells}) == 1
    assert f"{verdict['table'][1]['kl']:.5f}" in rows[2] and "- **refused** `int4/awq`: KL to the parent" in text


def test_the_schema_holds_for_a_verdict_and_not_for_a_broken_one(data: dict[str, Any]) -> None:
    schema = json.loads((Path(report.__file__).parent.parent / "verdict.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    good = json.loads((data["folder"] / "verdict.json").read_text())
    jsonschema.validate(good, schema)
    for change in ({"status": "great"}, {"checks": [{"name": "x"}]}, {"evaluation": None}, {"table": [{"state": 1}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**good, **change}, schema)


def test_pairs_compare_with_the_best_window_by_window(data: dict[str, Any]) -> None:
    states = data["verdict"]["states"]
    (pair,) = data["report"]["pairs"]
    other, best = states[pair["state"]], states[pair["best"]]
    assert best["kl"] < other["kl"] and pair["value"] == pytest.approx(other["kl"] - best["kl"])
    assert pair["low"] <= pair["value"] <= pair["high"]
    assert report.pairs(dict(list(states.items())[:2]), Sampling()) == []


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(("low", "high"), [(0.011, 0.013), (0.2, 950.0), (1e-7, 3.0), (4.0, 4.0)])
def test_ticks_are_round_inside_and_several(low: float, high: float, log: bool) -> None:
    scale = _svg.scale([low, high], 50, 400, log=log)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 12 and ticks == sorted(set(ticks))
    assert all(scale.low * 0.99 <= tick <= scale.high * 1.01 for tick in ticks)
    assert len({_svg.number(tick) for tick in ticks}) == len(ticks)
    assert 50 <= scale(low) <= scale(high) <= 400


def test_labels_of_points_at_one_place_do_not_cover_each_other() -> None:
    text = str(
        _svg.labels([(100, 60, "int4/awq"), (101, 60, "int4/gptq"), (100, 61, "x"), (430, 60, "far right")], 230)
    )
    places = [(float(x), float(y)) for x, y in re.findall(r'<text class="label" x="([\d.]+)" y="([\d.]+)"', text)]
    assert len(places) == 4
    near = sorted(y for x, y in places if x < 200)
    assert all(b - a >= 13 for a, b in itertools.pairwise(near))
    assert all(x + _svg.LETTER < _svg.WIDTH for x, _ in places)


def test_the_share_of_tokens_above_an_edge_falls(data: dict[str, Any]) -> None:
    spread = data["report"]["spread"]["int4/awq"]
    total, tokens = sum(spread["counts"]), data["verdict"]["evaluation"]["num_tokens"]
    assert total == tokens
    chart = _charts._spread(data["report"])
    assert chart is not None
    first = re.search(r'class="line s0" d="M([^"]+)"', str(chart.body))
    assert first is not None
    heights = [float(point.split()[1]) for point in first[1].split("L")]
    assert heights == sorted(heights) and math.isclose(heights[0], _svg.TOP, abs_tol=10)


def test_layers_take_the_best_pair_of_columns_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "layers.csv"
    path.write_text("layer,error_rtn,error,weighted_error_plain,weighted_error\na,.4,.3,.2,.1\nb,.4,.3,.2,.05\n")
    found = report.layers(path)
    assert found is not None and (found["before"], found["after"], found["output"]) == (
        "weighted_error_plain", "weighted_error", True,
    )  # fmt: skip
    assert [row["after"] for row in found["rows"]] == [0.1, 0.05]
    path.write_text("layer,error_rtn,error,weighted_error_plain,weighted_error\na,.4,.3,,\n")
    found = report.layers(path)
    assert found is not None and not found["output"] and found["rows"][0]["after"] == 0.3
    assert found["rows"][0]["ranged"] is None and found["rows"][0]["seconds"] is None
    path.write_text("layer,format\na,int4\n")
    assert report.layers(path) is None
