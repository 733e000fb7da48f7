"""The YAML that recipes and `dotted.key=value` are written in: values, paths, overlays."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qat import arguments
from qat.recipe import merge


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("-1.5E+3", -1500.0),
        (".5", 0.5),
        ("007", 7),
        ("-3", -3),
        ("no", "no"),
        ("on", "on"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("null", None),
        ("", None),
        ("~", None),
        ("a=b", "a=b"),
        ("1.2.3", "1.2.3"),
        ("{a: [1, x]}", {"a": [1, "x"]}),
        ("'1e-5'", "1e-5"),
    ],
)
def test_yaml_means_what_it_says(text: str, value: Any) -> None:
    got = arguments.read_yaml(text)
    assert got == value and type(got) is type(value)


def test_special_floats() -> None:
    assert arguments.read_yaml("[.inf, -.Inf]") == [float("inf"), float("-inf")]
    assert arguments.read_yaml(".nan") != arguments.read_yaml(".nan")


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_float_that_python_prints_is_read_back(number: float) -> None:
    assert arguments.read_yaml(repr(number)) == number


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="ascii", exclude_categories=["C"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3),
    max_leaves=8,
)
trees = st.dictionaries(st.sampled_from("abcd"), json_values, max_size=4)


@given(trees)
def test_json_is_yaml(tree: Any) -> None:
    assert arguments.read_yaml(json.dumps(tree)) == tree


@given(trees, trees)
def test_merge_keeps_the_overlay_and_what_it_does_not_name(base: dict[str, Any], overlay: dict[str, Any]) -> None:
    merged = merge(base, overlay)
    assert set(merged) == set(base) | set(overlay)
    assert merge(merged, overlay) == merged
    for key, value in merged.items():
        if key not in overlay:
            assert value == base[key]
        elif not isinstance(overlay[key], dict):
            assert value == overlay[key]


@given(st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=3), st.integers())
def test_an_override_is_found_at_its_path(path: list[str], value: int) -> None:
    values: dict[str, Any] = {}
    arguments.override(values, f"{'.'.join(path)}={value}")
    for key in path:
        values = values[key]
    assert values == value
