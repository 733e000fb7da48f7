"""The latency check against a program that answers as vLLM's server and benchmark do."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest

from gate import latency
from gate._bootstrap import Sampling
from gate.stage import _latency
from qat import plan, plugins, serving, train
from qat.compare import Choices
from qat.compare import main as compare
from qat.recipe import Recipe, RecipeError, load

# `serve DIR`: a health page. `bench serve`: the JSON of vLLM 0.32, quantized models twice as fast between tokens.
# It writes down what it was asked, and refuses to serve a model whose config.json says "broken".
FAKE = """#!PYTHON
import http.server, json, os, sys
given = dict(zip(sys.argv, sys.argv[1:]))
log = open(os.environ["FAKE_LOG"], "a")
def config(folder):
    return json.load(open(folder + "/config.json"))
if sys.argv[1] == "serve":
    print("serve", sys.argv[2], os.getpid(), given["--max-num-seqs"], file=log, flush=True)
    if "broken" in config(sys.argv[2]):
        sys.exit("ValueError: no kernel for this")
    if "silent" in config(sys.argv[2]):
        sys.exit(0)
    print("Model loading took 1.50 GiB memory and 0.1 seconds", flush=True)
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()
    http.server.HTTPServer(("127.0.0.1", int(given["--port"])), Page).serve_forever()
folder, batch = given["--model"], int(given["--max-concurrency"])
print("bench", folder, batch, given["--random-input-len"], given["--random-output-len"], file=log, flush=True)
fast = 0.5 if config(folder).get("quantization_config") else 1.0
answer = {"completed": 8, "failed": 0, "mean_ttft_ms": 20.0, "mean_tpot_ms": 8.0 * fast,
          "output_throughput": batch * 100 / fast}
json.dump(answer, open(given["--result-dir"] + "/" + given["--result-filename"], "w"))
"""
ASKED = {"batches": [1, 4], "prompt_tokens": 16, "output_tokens": 8, "pairs": 3}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The program; what it was asked is in the file `log` beside it."""
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.write_text(FAKE.replace("PYTHON", sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("FAKE_LOG", str(program.with_name("log")))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody is there
    return program


def models(tmp_path: Path, **configs: dict[str, Any]) -> dict[str, Path]:
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    return {name: tmp_path / name for name in configs}


def options(program: Path, **more: Any) -> latency.Options:
    return latency.Options.model_validate({"program": str(program), **ASKED, **more})


def test_parent_and_exports_are_served_in_turn_and_their_numbers_kept(fake: Path, tmp_path: Path) -> None:
    folders = models(tmp_path, parent={}, int4={"quantization_config": {"bits": 4}}, bad={"broken": 1})
    found = _latency.measure(folders, "float16", options(fake).model_dump())
    assert found["bad"] == {"error": "it ended with 1: ValueError: no kernel for this"}
    for name, share in (("parent", 1.0), ("int4", 0.5)):
        assert found[name]["memory_gb"] == pytest.approx(1.5 * 2**30 / 1e9)
        for batch in (1, 4):
            numbers = found[name]["batches"][str(batch)]
            assert numbers["first_token_s"] == [0.020] * 3
            assert numbers["inter_token_s"] == pytest.approx([0.008 * share] * 3)
            assert numbers["tokens_per_s"] == [batch * 100 / share] * 3
    lines = [line.split() for line in fake.with_name("log").read_text().splitlines()]
    starts = [(Path(line[1]).name, int(line[2])) for line in lines if line[0] == "serve"]
    # the second pair begins with int4; one that failed is not tried again
    assert [name for name, _ in starts] == ["parent", "int4", "bad", "int4", "parent", "parent", "int4"]
    assert not any(psutil.pid_exists(pid) for _, pid in starts)
    assert {line[3] for line in lines if line[0] == "serve"} == {"4"}  # prepared for no more requests at once
    assert {tuple(line[2:]) for line in lines if line[0] == "bench"} == {("1", "16", "8"), ("4", "16", "8")}


def test_a_parent_that_is_not_served_is_an_error(fake: Path, tmp_path: Path) -> None:
    folders = models(tmp_path, parent={"broken": 1})
    with pytest.raises(ValueError, match="vllm does not serve parent: it ended with 1: ValueError: no kernel"):
        _latency.measure(folders, "float16", options(fake).model_dump())


def test_a_program_that_ends_without_a_word_is_said_to(fake: Path, tmp_path: Path) -> None:
    folders = models(tmp_path, parent={"silent": 1})
    with pytest.raises(ValueError, match=r"vllm does not serve parent: it ended with 0 and said nothing$"):
        _latency.measure(folders, "float16", options(fake).model_dump())


def served(inter: list[float]) -> dict[str, Any]:
    numbers = {"first_token_s": [0.02] * len(inter), "inter_token_s": inter, "tokens_per_s": [1 / s for s in inter]}
    return {"latency": {"memory_gb": 1.0, "batches": {"1": numbers}}}


def test_bounds_are_judged_on_ratios_within_pairs() -> None:
    # the machine slows down by a factor of 4 over the pairs, parent and export alike: only the ratio counts
    parent, export = served([0.010, 0.020, 0.040]), served([0.0051, 0.0098, 0.0201])
    asked = latency.Options(max_inter_token_ratio=0.6, min_throughput_ratio=1.5, max_first_token_ratio=0.9)
    first, inter, throughput = latency.judge(export, parent, asked, Sampling(0.9))
    mean = math.exp(sum(math.log(r) for r in (0.51, 0.49, 0.5025)) / 3)
    assert inter.value == pytest.approx(mean) and inter.outcome == "passed"
    assert throughput.value == pytest.approx(1 / mean) and throughput.outcome == "passed"
    assert first.value == 1.0 and first.outcome == "failed"
    assert [c.name.rpartition(".")[2] for c in (first, inter, throughput)] == [
        "max_first_token_ratio", "max_inter_token_ratio", "min_throughput_ratio",
    ]  # fmt: skip
    unsure = latency.judge(served([0.004, 0.02, 0.024]), parent, latency.Options(max_inter_token_ratio=0.6), Sampling())
    assert [check.outcome for check in unsure] == ["undecided"]
    assert latency.judge({}, parent, asked, Sampling()) == []
    refused = latency.judge({"latency": {"error": "no kernel"}}, parent, latency.Options(), Sampling())
    assert [(check.name, check.outcome) for check in refused] == [("latency.served", "failed")]


def recipe(output: Path, program: Path | str, *more: str) -> list[str]:
    asked = ", ".join(f"{key}: {value}" for key, value in {**ASKED, "program": program}.items())
    return ["recipe=micro.yaml", f"output={output}", f"gate.latency={{{asked}, max_inter_token_ratio: 0.6}}", *more]


def test_a_missing_engine_is_an_error_before_anything_is_calibrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(plugins.ROOT)
    assert train.main(recipe(tmp_path, "no-such-engine")) == 2
    assert "gate.latency.program: there is no no-such-engine on the PATH" in capsys.readouterr().err
    assert not list((tmp_path / "micro").glob("calibrate-*"))
    with pytest.raises(RecipeError, match="no-such-engine"):
        plan.main(recipe(tmp_path, "no-such-engine"))
    for more, why in (
        ("gate.latency.engine=trtllm", "no gate/servers/trtllm.py"),
        ("export.engines=[transformers]", "vllm is none of export.engines"),
    ):
        with pytest.raises(RecipeError, match=why):
            serving.check(load([*recipe(tmp_path, sys.executable), more]))


def test_a_run_judges_latency_and_keeps_it_for_this_machine(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(plugins.ROOT)
    run = recipe(tmp_path, fake, "train=null", "gate.statistics.confidence=0.6")
    assert train.main(run) == 0
    folder = tmp_path / "micro"
    verdict = json.loads((folder / "verdict.json").read_text())
    jsonschema.validate(verdict, json.loads((plugins.ROOT / "gate/verdict.schema.json").read_text()))
    rows = {(row["state"], row["batch"]): row for row in verdict["latency"]}
    assert set(rows) == {(state, batch) for state in ("parent", "compressed_tensors") for batch in (1, 4)}
    row = rows["compressed_tensors", 4]
    assert row["inter_token_ratio"] == pytest.approx(0.5) and row["throughput_ratio"] == pytest.approx(2)
    assert (row["first_token_ms"], row["tokens_per_s"]) == (pytest.approx(20), 800)
    names = {check["name"] for check in verdict["checks"]}
    assert names >= {f"latency.batch{batch}.max_inter_token_ratio" for batch in (1, 4)}
    assert "KL against latency" in (folder / "report.html").read_text()
    assert len(json.loads((folder / "report.json").read_text())["latency"]) == 4
    before = fake.with_name("log").read_text()
    assert train.main([*run, "gate.latency.max_inter_token_ratio=0.4"]) == 3  # judged again, not measured again
    assert fake.with_name("log").read_text() == before
    page = compare([str(folder)], Choices(), tmp_path / "compare")
    assert "KL against latency" in page.read_text()
    fake.touch()  # another engine, as far as anyone knows
    assert train.main(run) == 0
    assert fake.with_name("log").read_text() != before


def test_the_recipe_says_which_option_is_wrong() -> None:
    values = load(["recipe=micro.yaml"]).model_dump()
    for option, value in (("pairs", 1), ("batches", []), ("output_tokens", 1), ("program", "")):
        with pytest.raises(ValueError, match=option):
            Recipe.model_validate({**values, "gate": {**values["gate"], "latency": {option: value}}})
