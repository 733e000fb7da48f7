"""A model, texts and names that are made to do harm: nothing is run, nothing is shown as markup, no secret is kept."""

from __future__ import annotations

import json
import os
import pickle
import re
import shlex
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from gate import lint
from qat import compare, plan
from qat.micro import make_micro
from qat.parent import open_parent
from qat.plugins import ROOT
from qat.recipe import RecipeError, load
from qat.train import main
from tests.gate.test_report import Page

EVIL = "<script>alert(1)<marquee>&\"'`$(touch pwned);|[x](javascript:y)\nlicense: mit\x1b"
CODE = "import pathlib\npathlib.Path({!r}).write_text('ran')\nclass Evil: ...\n"
AUTO_MAP = {"AutoConfig": "modeling_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
PICKLES = ("pytorch_model.bin", "training_args.bin", "tokenizer.pkl", "tokenizer.bin", "vocab.pkl", "optimizer.pt")
SECRETS = {"HF_TOKEN": "hf_abcdefghijklmnop", "HUGGING_FACE_HUB_TOKEN": "an-old-kind-of-token"}


class Bomb:
    """What runs when a pickle of it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.path, "ran"))


def plant(folder: Path, ran: Path) -> None:
    """Pickles and code that write the file `ran` when anybody opens them."""
    for name in PICKLES:
        (folder / name).write_bytes(pickle.dumps(Bomb(ran)))
    for name in ("modeling_evil.py", "tokenizer_evil.py"):
        (folder / name).write_text(CODE.format(str(ran)))
    for name in ("config.json", "tokenizer_config.json"):
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": AUTO_MAP}))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A whole run on such a model."""
    root = tmp_path_factory.mktemp("evil")
    parent, ran = root / EVIL, root / "ran"
    shutil.copytree(make_micro(root / "micro"), parent)
    plant(parent, ran)
    (parent / "README.md").write_text("---\nlicense: '[x](javascript:y)'\n---\n")
    texts = {}
    for part in ("calibration", "training", "evaluation"):
        text = (ROOT / f"recipes/demo/text/{part}.txt").read_text(encoding="utf-8")[:20000]
        texts[part] = root / f"{EVIL}{part}.txt"
        texts[part].write_text(f"<script>{text}".replace(" the ", "<script>"), encoding="utf-8")
    task = root / "task.jsonl"
    task.write_text('{"context": "<marquee>", "choices": ["<script>", "y"], "answer": 0}\n' * 3)
    quoted = {part: f"data.{part}.source={json.dumps(str(path))}" for part, path in texts.items()}
    gate = {"tasks": {"offline": {EVIL: str(task)}}, "divergence": {"max_kl": 9}, "lint": {}, "perplexity": {}}
    gate["statistics"] = {"max_parent_perplexity": 10_000.0}
    command = [
        "recipe=micro.yaml",
        f"output={root / 'runs'}",
        f"model.source={json.dumps(str(parent))}",
        *quoted.values(),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        for owner, name in ((torch, "load"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
            patch.setattr(owner, name, lambda *_, **__: pytest.fail("a pickle was opened"))
        patch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
        code = main([*command, f"gate={json.dumps(gate)}", "compute.device=cpu"])
        run = root / "runs/micro"
        release = next(run.glob("release-*/compressed_tensors"), None)
        faults = []
        if release:
            plant(shutil.copytree(release, root / "planted") and root / "planted", ran)
            faults = lint.check(root / "planted", ["vllm"])
        compare.main([str(run)], compare.Choices(device="cpu"), root / "compare")
    return SimpleNamespace(root=root, parent=parent, ran=ran, code=code, run=run, release=release, faults=faults)


def written(root: Path) -> dict[str, str]:
    """The text of every text file that the run wrote."""
    kinds = (".json", ".html", ".md", ".xml", ".csv", ".sh", ".py", ".yaml")
    paths = [*root.glob("runs/**/*"), *root.glob("compare/*")]
    return {str(p.relative_to(root)): p.read_text(encoding="utf-8") for p in paths if p.is_file() and p.suffix in kinds}


def test_no_pickle_is_opened_and_no_code_of_the_model_is_run(made: SimpleNamespace) -> None:
    assert made.code == 0 and made.release, "the model itself is good"
    assert made.faults == [] and not made.ran.exists()
    shipped = {path.name for path in (made.root / "runs").rglob("*") if path.is_file()}
    assert not shipped & {*PICKLES, "modeling_evil.py", "tokenizer_evil.py"}
    pickle.loads((made.parent / PICKLES[0]).read_bytes())
    assert made.ran.exists(), "the planted pickle works"
    made.ran.unlink()


def test_a_model_of_pickles_alone_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(make_micro(tmp_path / "micro"), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    plant(folder, tmp_path / "ran")
    with pytest.raises(ValueError, match="is a pickle, which is never loaded"):
        open_parent(str(folder), None, False, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_model_that_needs_its_own_code_is_refused_without_a_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(make_micro(tmp_path / "micro"), tmp_path / "model")
    plant(folder, tmp_path / "ran")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "evil", "architectures": ["Evil"]}))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    with pytest.raises(ValueError, match=r"architecture Evil .* is not known"):
        open_parent(str(folder), None, False, tmp_path)
    assert lint.check(folder, ["vllm"])[0].kind == "config"
    assert not (tmp_path / "ran").exists()


def test_no_secret_is_written(made: SimpleNamespace) -> None:
    texts = written(made.root)
    assert len(texts) > 20
    for name, text in texts.items():
        assert not [secret for secret in SECRETS.values() if secret in text], name


@pytest.mark.parametrize(
    "secret",
    [
        "model.revision=hf_abcdefghijkl",
        "data.training.source=https://me:word@host/x",
        "name=an-old-kind-of-token",
        "model.source=https://word@host/x",
        "output=https://host/x?token=word",
    ],
)
@pytest.mark.parametrize("place", ["argument", "file"])
def test_a_recipe_with_a_secret_is_refused_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], secret: str, place: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRETS["HUGGING_FACE_HUB_TOKEN"])
    arguments = ["recipe=micro.yaml", secret]
    if place == "file":
        recipe = yaml.safe_load((ROOT / "recipes/micro.yaml").read_text())
        (tmp_path / "own.yaml").write_text(yaml.safe_dump({**recipe, "x": secret.partition("=")[2]}))
        arguments = [f"recipe={tmp_path / 'own.yaml'}"]
    with pytest.raises(RecipeError, match="holds a token or a password"):
        load(arguments)
    with pytest.raises(RecipeError):
        plan.main(arguments)
    assert main([*arguments, f"output={tmp_path}"]) == 2
    said = "".join(capsys.readouterr())
    assert "***" in said and not re.search("hf_a|word[@&]|=word|old-kind", said)


@pytest.mark.parametrize("name", ["runs/micro/report.html", "compare/compare.html"])
def test_pages_show_names_as_text(made: SimpleNamespace, name: str) -> None:
    text = (made.root / name).read_text(encoding="utf-8")
    page = Page(text)
    assert {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "marquee"} == set()
    assert not [attrs for _, attrs in page.tags if {"src", "href", "xlink:href"} & set(attrs)]
    assert "&lt;script&gt;" in text, "the name is there"


def test_the_pull_request_table_and_the_card_show_names_as_text(made: SimpleNamespace) -> None:
    card = (made.release / "README.md").read_text(encoding="utf-8")
    head, front, body = card.split("---\n", 2)
    said = yaml.safe_load(front)
    assert head == "" and said["base_model"] == made.parent.name and "mit" not in said.get("license", "")
    assert set(said) <= {"base_model", "license", "library_name", "tags", "model-index"}
    for text in (body, (made.run / "summary.md").read_text(encoding="utf-8")):
        assert re.findall(r"(?<!\\)<\w+|(?<!\\)\]\(|^license:", text, re.MULTILINE) == []
    assert "alert(1)" in body


def test_junit_is_xml(made: SimpleNamespace) -> None:
    root = ElementTree.parse(made.run / "junit.xml").getroot()
    assert {case.tag for case in root.iter()} <= {
        "testsuites",
        "testsuite",
        "testcase",
        "system-out",
        "failure",
        "error",
    }


def test_launchers_run_nothing_of_a_name(made: SimpleNamespace) -> None:
    script = (made.release / "serve/vllm.sh").read_text()
    words = shlex.split(next(line for line in script.splitlines() if line.startswith("exec")))
    assert re.fullmatch(r"[\w.-]+", words[words.index("--served-model-name") + 1])
    assert "pwned" not in [path.name for path in (*made.root.rglob("pwned"), *Path(os.getcwd()).glob("pwned"))]
