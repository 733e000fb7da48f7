"""`tare compare` and `tare verify` on a run of the micro recipe, and what a run leaves for people and pipelines."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaForCausalLM
from typer.testing import CliRunner

from gate import _measure
from qat import compare, report
from qat.cli import app
from qat.plugins import ROOT
from qat.train import main

TEXT = ROOT / "recipes/demo/text/evaluation.txt"
BOUNDS = {"a": {}, "b": {"gate": {"divergence": {"max_kl": 1e-6}}}}


@pytest.fixture(autouse=True)
def in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name in ("TARE_LOG", "TARE_PROGRESS"):  # the command sets them; this brings them back
        monkeypatch.setenv(name, "")


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two variants of one model, of which the second misses its own bound. Not to be changed."""
    folder = tmp_path_factory.mktemp("output")
    recipe = yaml.safe_load((ROOT / "recipes/micro.yaml").read_text())
    recipe["gate"]["divergence"] = {"max_kl": 1.0}
    recipe["gate"]["tasks"] = {"offline": {"words": "words.jsonl"}}
    rows = [{"context": f"{n} and", "choices": [" one", " two"], "answer": n % 2} for n in range(6)]
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    variants = {name: {"train": None, **overlay} for name, overlay in BOUNDS.items()}
    (folder / "two.yaml").write_text(yaml.safe_dump({**recipe, "variants": variants}))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        assert main([f"recipe={folder / 'two.yaml'}", f"output={folder}"]) == 3
    return folder


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def summary(output: Path) -> dict[str, Any]:
    return json.loads((output / "two/summary.json").read_text())


def test_each_export_is_judged_and_released_by_itself(output: Path) -> None:
    said = summary(output)
    assert said["status"] == "refused" and said["report"] == "report.html"
    released = {name: export["released"] for name, export in said["exports"].items()}
    assert released == {"a/compressed_tensors": True, "b/compressed_tensors": False}
    folder = output / "two" / said["last_released"]
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["a"]
    assert said["exports"]["a/compressed_tensors"]["path"].startswith(said["last_released"])
    assert (output / "two" / said["exports"]["b/compressed_tensors"]["path"]).is_dir()
    for name in ("report.html", "report.json", "verdict.json", "junit.xml", "summary.md"):
        assert (output / "two" / name).stat().st_size > 100


def test_a_quiet_run_that_is_refused_says_why_in_one_line(
    output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(output, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("TARE_LOG", "quiet")
    assert main([f"recipe={tmp_path / 'two.yaml'}", f"output={tmp_path}"]) == 3
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("refused b/compressed_tensors: KL to the parent"), said
    assert said.err.count("\n") == 1


def test_the_card_of_a_release_is_one_that_the_hub_reads(output: Path) -> None:
    said = summary(output)
    folder = output / "two" / said["exports"]["a/compressed_tensors"]["path"]
    card = ModelCard.load(folder / "README.md").data
    verdict = json.loads((output / "two/verdict.json").read_text())
    state = verdict["states"]["a/compressed_tensors"]
    assert card.base_model == "tare-micro" and card.tags == ["int4-g32", "compressed_tensors", "tare"]
    assert card.eval_results is not None
    values = {(result.dataset_type, result.metric_type): result.metric_value for result in card.eval_results}
    assert values == {
        ("evaluation.txt", "perplexity"): state["perplexity"],
        ("evaluation.txt", "kl_divergence"): state["kl"],
        ("evaluation.txt", "top1_agreement"): state["top1"],
        ("words", "acc_norm"): state["tasks"]["words"]["score"],
    }


def test_what_a_file_of_examples_says_decides_the_gate_stage_not_where_it_lies(output: Path, tmp_path: Path) -> None:
    def gate_keys(recipe: Path) -> tuple[int, list[str]]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_measure, "measure_many", None)  # known by content
            code = main([f"recipe={recipe}", f"output={tmp_path}"])
        stages = json.loads((tmp_path / "two/summary.json").read_text())["stages"]
        return code, [stage["key"] for stage in stages if stage["name"] == "gate"]

    shutil.copytree(output, tmp_path, dirs_exist_ok=True)
    before = [stage["key"] for stage in summary(output)["stages"] if stage["name"] == "gate"]
    assert gate_keys(tmp_path / "two.yaml") == (3, before)
    lines = (tmp_path / "words.jsonl").read_text().splitlines()
    (tmp_path / "words.jsonl").write_text("\n".join(lines[:5]) + "\n")
    code, after = gate_keys(tmp_path / "two.yaml")
    assert code == 3 and after != before


def test_runs_and_foreign_checkpoints_are_compared_on_the_same_text(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that transformers saved, with one block's linears 5% too large, and its own perplexity and KL."""
    parent = output / ".parents/micro"
    model = LlamaForCausalLM.from_pretrained(parent).float()
    tokenizer = AutoTokenizer.from_pretrained(parent)
    ids = tokenizer(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"][: 4 * 32]
    windows = torch.tensor(ids).view(4, 32)
    with torch.no_grad():
        p = model(windows).logits.double().log_softmax(-1)[:, :-1]
        for linear in model.model.layers[1].mlp.children():
            if hasattr(linear, "weight"):
                linear.weight.mul_(1.05)
        q = model(windows).logits.double().log_softmax(-1)[:, :-1]
    model.save_pretrained(tmp_path / "foreign")
    out = tmp_path / "out"
    done = run("compare", output / "two", tmp_path / "foreign", "--out", out, "--no-progress")
    assert done.exit_code == 0, done.output
    found = json.loads((out / "compare.json").read_text())
    rows = {row["state"]: row for row in found["table"]}
    assert list(rows) == [
        "parent", "two/a/rtn", "two/a/calibrate", "two/b/rtn", "two/b/calibrate", "two/a/compressed_tensors",
        "two/b/compressed_tensors", "foreign",
    ]  # fmt: skip
    assert rows["foreign"]["kl"] == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-3)
    nll = -q.gather(2, windows[:, 1:, None]).mean()
    assert rows["foreign"]["perplexity"] == pytest.approx(nll.exp().item(), rel=1e-4)
    verdict = json.loads((output / "two/verdict.json").read_text())
    for name in ("a/compressed_tensors", "a/rtn"):
        assert rows[f"two/{name}"]["kl"] == verdict["states"][name]["kl"]
    assert rows["two/a/compressed_tensors"]["kl_recovered"] is not None
    asked = {name: verdict["states"][name]["tasks"]["words"]["scores"] for name in ("parent", "a/compressed_tensors")}
    for name, scores in zip(("parent", "two/a/compressed_tensors"), asked.values(), strict=True):
        assert rows[name]["accuracy"] == sum(scores) / 6
    answers = {row["state"]: row for row in found["tasks"]}
    assert list(answers) == ["parent", "two/a/compressed_tensors", "two/b/compressed_tensors"]
    gain = (sum(asked["a/compressed_tensors"]) - sum(asked["parent"])) / 6
    assert answers["two/a/compressed_tensors"]["gain"] == pytest.approx(gain) and rows["foreign"]["accuracy"] is None
    assert set(found["layers"]) == {"two/a"}  # b has the same calibration, which was done once
    assert (out / "compare.html").stat().st_size > 10_000
    with (out / "compare.csv").open() as f:
        assert [row["state"] for row in csv.DictReader(f)] == list(rows)
    assert {pair["state"] for pair in found["pairs"]} | {found["pairs"][0]["best"]} == {
        "two/a/compressed_tensors", "two/b/compressed_tensors", "foreign",
    }  # fmt: skip
    monkeypatch.setattr(_measure, "measure_many", None)  # the second time nothing is measured
    assert run("compare", output / "two", tmp_path / "foreign", "--out", out, "--quiet").exit_code == 0
    assert json.loads((out / "compare.json").read_text()) == found


def test_checkpoints_alone_need_a_parent_and_a_text(output: Path, tmp_path: Path) -> None:
    parent = output / ".parents/micro"
    shutil.copytree(parent, tmp_path / "copy")
    out = ("--out", tmp_path / "out")
    lacking = run("compare", tmp_path / "copy", tmp_path / "nothing", tmp_path, *out)
    assert lacking.exit_code == 2
    for line, words in zip(
        lacking.output.splitlines()[1:],
        ("nothing does not exist", "neither the folder of a run", "give --parent", "give --text"),
        strict=True,
    ):
        assert words in line, lacking.output
    (tmp_path / "failed").mkdir()
    (tmp_path / "failed/summary.json").write_text('{"status": "failed", "stages": [], "exports": {}, "verdict": null}')
    nowhere = run("compare", tmp_path / "copy", "--parent", tmp_path / "no", "--text", "no.txt", *out)
    assert nowhere.exit_code == 2
    assert f"--parent {tmp_path / 'no'} does not exist\n  --text no.txt does not exist\n" in nowhere.output
    file = run("compare", tmp_path / "copy", "--parent", TEXT, "--text", TEXT, *out)
    assert file.exit_code == 1 and f"--parent {TEXT} is not a folder with a Hugging Face model" in file.output
    failed = run("compare", tmp_path / "failed", "--parent", parent, "--text", TEXT, *out)
    assert failed.exit_code == 2 and "has no finished stage (status failed)" in failed.output
    done = run("compare", tmp_path / "copy", "--parent", parent, "--text", TEXT, "--sequences", 3, "--length", 20, *out)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "out/compare.json").read_text())
    assert found["evaluation"]["num_windows"] == 3 and found["evaluation"]["length"] == 20
    copy = found["table"][1]
    assert (copy["kl"], copy["increase"], copy["kl_low"], copy["increase_high"], copy["top1"]) == (0, 0, 0, 0, 1)
    too_long = run("compare", tmp_path / "copy", "--parent", parent, "--text", TEXT, "--length", 999, *out)
    assert too_long.exit_code == 1 and "--length 256" in too_long.output


def test_tasks_of_runs_are_shown_when_all_asked_the_same_parent_the_same() -> None:
    def state(fingerprint: str, *scores: float) -> dict[str, Any]:
        return {"fingerprint": fingerprint, "tasks": {"t": {"scores": list(scores)}}}

    def ran(name: str, parent: dict[str, Any]) -> compare.Ran:
        said = {"states": {"parent": parent, "awq": state("x", 0, 1)}}
        return compare.Ran(Path(name), {"exports": {"awq": {}}}, {}, said)

    states: dict[str, Any] = {"parent": {"fingerprint": "p"}, "a/awq": {}, "b/awq": {}, "c/awq": {}, "d/awq": {}}
    notes = list[str]()
    for name, parent in zip("abcd", (state("p", 1, 0), state("p", 1, 1), state("q", 1, 0), {}), strict=True):
        compare._add_tasks(states, ran(name, parent), f"{name}/", notes)
    assert states["parent"]["tasks"]["t"]["scores"] == [1, 0] and states["a/awq"]["tasks"]["t"]["scores"] == [0, 1]
    assert states["b/awq"] == states["c/awq"] == states["d/awq"] == {}
    assert [note.split()[0] for note in notes] == ["b", "c"]


def test_what_is_to_be_said_of_several_candidates_is_said_once() -> None:
    def pair(state: str, value: float, *ends: float | None) -> dict[str, Any]:
        return {"state": state, "best": "a", "value": value, "low": ends[0], "high": ends[1]}

    same = [pair("b", 0, 0, 0), pair("c", 0, 0, 0)]
    other = [
        pair("d", 0.1, -0.1, 0.3),
        pair("e", 0.1, -0.1, 0.3),
        pair("f", 0.1, 0.05, 0.3),
        pair("g", 0.2, None, None),
    ]
    assert list(compare.verdicts([*same, *other])) == [
        "b, c: KL as a",
        "d, e: KL +0.10000 against a (between -0.10000 and +0.30000); too few windows to tell them apart",
        "f: KL +0.10000 against a (between +0.05000 and +0.30000)",
        "g: KL +0.20000 against a",
    ]


def test_verify_finds_every_kind_of_difference(output: Path, tmp_path: Path) -> None:
    said = summary(output)
    source = output / "two" / said["exports"]["a/compressed_tensors"]["path"]
    shutil.copytree(source, tmp_path / "elsewhere")
    good = run("verify", tmp_path / "elsewhere", output / "two")
    assert good.exit_code == 0 and "files as tare.json says (sha256 " in good.output
    would = run("push", tmp_path / "elsewhere", "me/model", "--dry-run")
    said_in_a_title = " ".join(would.output.split())  # which wraps after a long path
    assert would.exit_code == 0 and "tare.json, released" in said_in_a_title, would.output
    tensors = load_file(tmp_path / "elsewhere/model.safetensors")
    name = next(name for name in tensors if name.endswith("weight_scale"))
    tensors[name].view(-1)[0] *= 1.05
    (tmp_path / "elsewhere/model.safetensors").unlink()  # it may be a hard link
    save_file(tensors, tmp_path / "elsewhere/model.safetensors", metadata={"format": "pt"})
    (tmp_path / "elsewhere/config.json").unlink()
    (tmp_path / "elsewhere/extra.safetensors").write_bytes(b"x")
    (tmp_path / "elsewhere/.gitattributes").write_text("")
    manifest = json.loads((tmp_path / "elsewhere/tare.json").read_text())
    manifest["files"]["../outside"] = {"sha256": "0", "size": 0}
    (tmp_path / "elsewhere/tare.json").write_text(json.dumps(manifest))
    bad = run("verify", tmp_path / "elsewhere")
    assert bad.exit_code == 1
    for why in (
        "model.safetensors has sha256", "config.json is missing", "extra.safetensors is not in tare.json",
        "../outside leads out of the folder",
    ):  # fmt: skip
        assert why in bad.output
    assert ".gitattributes" not in bad.output
    nothing = run("verify", tmp_path)
    assert nothing.exit_code == 1 and "nothing says what its files should be" in nothing.output


STAGE = '{"name": "gate", "variant": null, "key": "k", "path": "gate-k", "metrics": {}}'
BAD = {  # summary.json of a folder -> what is said of it
    "": "summary.json is not JSON",
    "[]": "summary.json holds a JSON list",
    "{}": "summary.json is not what Tare writes: status: field required",
    '{"status": "x", "exports": {}, "verdict": null, "stages": [{"key": 1}]}': "stages.0.name: field required",
    '{"status": "x", "exports": {"a": 5}, "verdict": null, "stages": []}': "exports.a: ",
    '{"status": "failed", "exports": {}, "verdict": null, "stages": []}': "has no finished stage (status failed)",
    '{"status": "failed", "exports": {}, "verdict": null, "stages": [], "last_released": "release-1"}': "/release-1",
    f'{{"status": "x", "exports": {{}}, "verdict": null, "stages": [{STAGE}]}}': "",
}


@pytest.mark.parametrize("text", BAD)
def test_a_folder_that_is_no_whole_run_is_named_and_not_passed(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    said = run("verify", tmp_path)
    assert said.exit_code == 1 and (BAD[text] or "gate-k: manifest.json is missing") in said.output
    assert isinstance(said.exception, SystemExit)
    said = run("compare", tmp_path, "--out", tmp_path / "out")
    assert said.exit_code == 2 and (BAD[text] or "has none of the stages that its summary.json names") in said.output


@pytest.mark.parametrize("files", ["5", '{"a": 5}', '{"a": {"size": 1}}', '{"a": {"size": "x", "sha256": ""}}'])
def test_a_manifest_that_is_none_is_named(tmp_path: Path, files: str) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / "tare.json").write_text(f'{{"files": {files}, "status": "released"}}')
    for command in (("verify", tmp_path), ("push", tmp_path, "me/model", "--dry-run")):
        said = run(*command)
        assert said.exit_code == 1 and "tare.json is not what Tare writes: files" in said.output
        assert isinstance(said.exception, SystemExit)


def test_a_json_log_is_one_object_a_line_and_a_quiet_one_is_empty(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TARE_LOG", "json")
    report.say("released [x]")
    report.heading("gate-1")
    report.table("t", ["format", "kl"], [["awq", 0.5], ["x", None]])
    report.complain("wrong")
    with report.Steps("train", total=9) as steps:
        steps.start = steps.said = report.monotonic() - 100
        steps.advance("kl 0.1", by=3)
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["event"] for line in lines] == ["say", "stage", "table", "progress"]
    assert lines[0]["text"] == "released [x]" and lines[2]["rows"] == [["awq", 0.5], ["x", None]]
    assert (lines[3]["done"], lines[3]["total"], lines[3]["eta_seconds"]) == (3, 9, 200)
    with report.Steps("gate", total=6, unit="window") as steps:
        for name, done in (("a", 1), ("b", 2), ("a", 3), ("b", 3)):
            steps.reach(name, done, 3)
        assert steps.done == 6
    assert json.loads(err) | {"time": ""} == {"event": "error", "time": "", "text": "wrong"}
    monkeypatch.setenv("TARE_LOG", "quiet")
    report.say("x")
    report.heading("x")
    report.table("t", ["a"], [[1]])
    report.complain("still said")
    assert capsys.readouterr() == ("", "still said\n")
    monkeypatch.setenv("TARE_LOG", "loud")
    with pytest.raises(ValueError, match="may be text, json or quiet"):
        report.say("x")
    assert run("verify", "--quiet", "--json", ".").exit_code == 2
