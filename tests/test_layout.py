"""The shape of the code: imports point one way, names hide nothing, files stay small."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = ("qat", "calibrate", "export", "gate")
FILES = sorted(path for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py"))
SPINE = ("qat.train", "qat.pipeline", "qat.states", "qat.cli", "qat.recipe", "qat.stages", "qat.plan", "qat.outline")
# what a file may not import: by the module it is, the longest prefix counts
FORBIDDEN = {
    "qat": ("calibrate", "export", "gate"),
    "qat.pipeline": (),  # it puts them together
    "qat.states": (),  # of pipeline
    "qat.train": (),
    "qat.mixed": (),
    "qat.results": (),
    "qat.compare": (),
    "qat.questions": (),  # of compare
    "qat.cli": (),  # a command starts the part it is about
    "calibrate": ("export", "gate", *SPINE),
    "export": ("calibrate", "gate", *SPINE),
    "gate": ("calibrate", "export", *SPINE),
    "gate.readers": ("calibrate", "export", *SPINE),
    "qat.scheme": ("torch", "transformers"),
    "qat.arch": ("torch", "transformers"),
}
LIGHT = ["arguments", "cli", "compatibility", "context", "manifest", "outline", "plan", "plugins", "ranks", "recipe"]
LIGHT += ["coverage", "groups", "push", "report", "serving", "verify", "scheme", "sections", "sizes", "stages"]
LIGHT += ["peak", "summary", "unjudged"]


def module(path: Path) -> str:
    return ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")


def imported(path: Path, top_level_only: bool = False) -> Iterator[str]:
    """Every module a file imports; `from a import b` counts as a and a.b."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively; write the whole path"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("path", FILES, ids=lambda path: module(path))
def test_imports_point_one_way(path: Path) -> None:
    rules = max((rule for rule in FORBIDDEN if inside(module(path), rule)), key=len)
    wrong = {name for name in imported(path) for no in FORBIDDEN[rules] if inside(name, no)}
    assert not wrong, f"{module(path)} must not import {sorted(wrong)}"


@pytest.mark.parametrize("name", LIGHT)
def test_what_plans_imports_nothing_heavy(name: str) -> None:
    heavy = ("torch", "transformers", "accelerate", "datasets", "safetensors", "numpy", "huggingface_hub")
    found = set(imported(REPOSITORY / "qat" / f"{name}.py", top_level_only=True))
    assert not {module for module in found for no in heavy if inside(module, no)}


@pytest.mark.parametrize(
    "package", ["calibrate.transform", "calibrate.range", "calibrate.round", "export.formats", "gate"]
)
def test_one_method_does_not_import_another(package: str) -> None:
    files = [path for path in (REPOSITORY / package.replace(".", "/")).glob("*.py") if not path.stem.startswith("_")]
    assert files
    for path in files:
        others = {module(other) for other in files} - {module(path)}
        assert not others & set(imported(path)), (
            f"{module(path)} imports another plugin; lift what they share to a _helper"
        )


def test_no_file_in_qat_hides_another_module() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    distributions = {word.split(">")[0].split("=")[0].split("<")[0].lower().replace("-", "_") for word in wanted}
    taken = {name.lower() for name in sys.stdlib_module_names} | distributions | {"yaml"}
    assert "accelerate" in taken and "token" in taken
    mine = {path.stem for path in (REPOSITORY / "qat").glob("*.py")} - {"__init__"}
    assert not mine & taken


@pytest.mark.parametrize("path", [*FILES, *sorted((REPOSITORY / "tests").rglob("*.py"))], ids=lambda path: module(path))
def test_a_file_is_one_idea(path: Path) -> None:
    limit = 350 if path in FILES else 500
    assert len(path.read_text(encoding="utf-8").splitlines()) < limit
