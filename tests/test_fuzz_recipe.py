"""Whatever stands in a recipe or on its command line is read or refused in words: no traceback, and not for long.

`FUZZ=20000 pytest --hypothesis-profile default` looks longer, for other examples.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from qat import plan
from qat.cli import _keys
from qat.recipe import Recipe, RecipeError, load
from qat.scheme import matches

EXAMPLES = int(os.environ.get("FUZZ", "150"))
FUZZ = settings(max_examples=EXAMPLES, deadline=5000, suppress_health_check=list(HealthCheck))
PATHS = [path for path, _ in _keys(Recipe)]
KEYS = [*sorted({part for path in PATHS for part in path.split(".")}), "x", "*", "name", "dtype", ""]
WORDS = ["demo", "micro", "mse", "awq", "int4", "fp8_e4m3", "kl", "auto", "group", "null", "lm_head", "calibrate"]
WORDS += ["~nobody/x", "a\0b", "/", "..", "x" * 5000, "\ud800", "*" * 40, "modelopt", "trtllm", "training.txt"]
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(WORDS) | st.text(max_size=8)
    | st.sampled_from([10**30, -(10**400), 1e308, 2**63, 0, -1])
)  # fmt: skip
keys = st.sampled_from(KEYS) | st.text(max_size=5) | st.integers() | st.none() | st.booleans()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=5), max_leaves=12
)
paths = st.lists(st.sampled_from(KEYS), min_size=1, max_size=4).map(".".join) | st.sampled_from(PATHS)
NASTY = ["a: &a [*a]", "a: &a {b: *a}", "? [1]\n: 2", "? {a: 1}\n: 2", "<<: 1", "<<: [1]", "a: 1e99999", "--- a\n--- b"]
NASTY += [
    "a: " + "[" * 9000,
    "{" * 9000,
    "- " * 9000,
    "a: " + "{a: " * 9000,
    "model: " + "9" * 5000,
    "\0",
    "a: 'b",
    "%",
]
NASTY += [f"a: !!{tag}" for tag in ("int x", "float x", "bool maybe", "timestamp x", "binary é", "set {b}", "omap [b]")]
NASTY += ["a: !!null x", "a: !!python/object:os.system x", "a: !!str [b]", 'a: "\\uD800"', "a: !x y", "name: !!int [1]"]
# each list holds the one before nine times: a billion values
NASTY += ["a: &a0 [x]\n" + "".join(f"b{i}: &a{i} [{f'*a{i - 1},' * 9}]\n" for i in range(1, 10)) + "data: *a9"]


def refused_or_read(arguments_: list[str]) -> Recipe | None:
    """The recipe, or None when it was refused in words that can be printed."""
    start = time.monotonic()
    try:
        recipe = load(arguments_)
    except RecipeError as error:
        assert str(error).strip() and str(error).encode("utf-8") is not None
        assert time.monotonic() - start < 3
        return None
    assert time.monotonic() - start < 3
    return recipe


@FUZZ
@given(st.lists(st.tuples(paths, values), min_size=1, max_size=4))
def test_overrides(module_root: Path, overrides: list[tuple[str, Any]]) -> None:
    said = [
        f"{path}={yaml.safe_dump(value, default_flow_style=True, width=10**9).strip()}" for path, value in overrides
    ]
    recipe = refused_or_read(["recipe=small.yaml", *said])
    if recipe is not None:
        assert Recipe.model_validate(recipe.model_dump()) == recipe
        with suppress(ValueError, OSError):  # a model that is not there
            plan.make(recipe)


@FUZZ
@given(
    st.lists(
        st.tuples(paths, st.text(max_size=12) | st.sampled_from([n.removeprefix("a: ") for n in NASTY])), max_size=3
    )
)
def test_overrides_that_are_any_text(module_root: Path, overrides: list[tuple[str, str]]) -> None:
    refused_or_read(["recipe=small.yaml", *(f"{path}={text}" for path, text in overrides)])


@FUZZ
@given(st.dictionaries(keys, values, max_size=6))
def test_recipes(module_root: Path, recipe: dict[Any, Any]) -> None:
    (module_root / "fuzz.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    refused_or_read(["recipe=fuzz.yaml"])


@FUZZ
@given(st.data())
def test_recipes_of_which_something_is_replaced(module_root: Path, data: st.DataObject) -> None:
    recipe = yaml.safe_load((module_root / "recipes/small.yaml").read_text())
    for _ in range(data.draw(st.integers(1, 3))):
        where: Any = recipe
        while isinstance(where, dict) and where:
            key = data.draw(st.sampled_from(sorted(where, key=str)))
            if not isinstance(where[key], dict) or data.draw(st.booleans()):
                where[key] = data.draw(values)
                break
            where = where[key]
    (module_root / "fuzz.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    refused_or_read(["recipe=fuzz.yaml"])


@FUZZ
@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda t: t.encode("utf-8", "surrogatepass")))
def test_files_of_any_bytes(module_root: Path, content: bytes) -> None:
    (module_root / "fuzz.yaml").write_bytes(content)
    refused_or_read(["recipe=fuzz.yaml"])


@pytest.mark.parametrize("text", NASTY, ids=range(len(NASTY)))
def test_yaml_that_is_meant_to_break_readers(module_root: Path, text: str) -> None:
    (module_root / "fuzz.yaml").write_text(text, encoding="utf-8")
    assert refused_or_read(["recipe=fuzz.yaml"]) is None
    assert refused_or_read(["recipe=small.yaml", f"model={text.removeprefix('a: ')}"]) is None


@pytest.mark.parametrize("name", ["~nobody/x.yaml", "a\0b", "x" * 5000, "", "/", ".", "\ud800", "recipe=recipe="])
def test_names_of_recipes(module_root: Path, name: str) -> None:
    assert refused_or_read([f"recipe={name}"]) is None


@FUZZ
@example("*" * 40 + "b", "a" * 100)
@given(st.text(alphabet="ab.*", max_size=30), st.text(alphabet="ab.*", max_size=40))
def test_patterns_of_names(pattern: str, name: str) -> None:
    start = time.monotonic()
    found = matches(pattern, name)
    assert time.monotonic() - start < 0.5
    assert found == _slow_matches(pattern, name)


def _slow_matches(pattern: str, name: str) -> bool:
    """By the table of which beginnings of the pattern match which beginnings of the name."""
    row = [True, *[False] * len(name)]
    for letter in pattern:
        if letter == "*":
            row = [any(row[: i + 1]) for i in range(len(row))]
        else:
            row = [False, *(row[i] and name[i] == letter for i in range(len(name)))]
    return row[-1]
