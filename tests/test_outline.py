"""Stage keys: everything that decides content changes them, nothing else does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qat import manifest, outline
from qat.recipe import load
from qat.stages import stage_key

REPOSITORY = Path(__file__).resolve().parent.parent
ROOT = {"parent": {"model.safetensors": "1"}, "calibration": "2", "training": "3", "evaluation": "4"}


def keys_of(*overrides: str, root: dict[str, Any] = ROOT) -> dict[str, str]:
    steps = outline.outline(load(["recipe=small.yaml", *overrides]), root)
    return {step.label: key for step, key in zip(steps, outline.keys(steps), strict=True)}


ALL = {"calibrate", "train", "export/compressed_tensors", "gate"}
FROM_TRAIN = ALL - {"calibrate"}
FROM_EXPORT = FROM_TRAIN - {"train"}
CHANGES = {
    "scheme.weights.group_size=64": ALL,
    "scheme.weights={}": ALL,
    "scheme.skip=[]": ALL,
    "scheme.overrides={'x': {group_size: 32}}": ALL,
    "calibrate.range.grid=31": ALL,
    "calibrate.range.norm=l1": ALL,
    "calibrate.range=activation": ALL,
    "data.calibration.sequences=5": ALL,
    "data.calibration.length=17": ALL,
    "data.calibration.seed=1": ALL,
    "compute.dtype=bfloat16": ALL,
    "train.learn={bias: 0.02}": FROM_TRAIN,
    "train.temperature=2": FROM_TRAIN,
    "train.steps=21": FROM_TRAIN,
    "train.batch=4": FROM_TRAIN,
    "train.micro_batch=4": FROM_TRAIN,
    "train.length=256": FROM_TRAIN,
    "train.warmup=3": FROM_TRAIN,
    "train.seed=1": FROM_TRAIN,
    "export.shard_gb=1": FROM_EXPORT,
    "model.dtype=float16": FROM_EXPORT,
    "gate.perplexity.windows=3": {"gate"},
    "data.evaluation.length=17": set(),  # through its fingerprint: see `inputs`
    "gate.perplexity.max_relative_increase=0.5": set(),  # judged every time, not measured
    "train.save_every=3": set(),
    "name=other": set(),
    "output=elsewhere": set(),
    "fresh=[train]": set(),
    "compute.device=cpu": set(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_field_that_decides_content_changes_the_keys_from_there_on(fake_root: Path, change: str) -> None:
    before, after = keys_of(), keys_of(change)
    expected = CHANGES[change]
    if change.startswith("data."):
        part = change.split(".")[1]
        recipe = load(["recipe=small.yaml", change])
        root = outline.inputs(recipe, fake_root / "recipes/demo/model", manifest.hash_file)
        base = outline.inputs(load(["recipe=small.yaml"]), fake_root / "recipes/demo/model", manifest.hash_file)
        before, after = keys_of(root=base), keys_of(change, root=root)
        expected = ALL if part == "calibration" else {"gate"}
    assert {label for label in ALL if before[label] != after[label]} == expected


def test_inputs_decide_the_keys_of_what_reads_them(fake_root: Path) -> None:
    before = keys_of()
    for part, expected in [("parent", ALL), ("calibration", ALL), ("training", FROM_TRAIN), ("evaluation", {"gate"})]:
        after = keys_of(root={**ROOT, part: "other"})
        assert {label for label in ALL if before[label] != after[label]} == expected


def test_a_plugin_that_says_its_numbers_changed_changes_the_key(fake_root: Path) -> None:
    before = keys_of()
    path = fake_root / "calibrate/round/nearest.py"
    path.write_text(path.read_text().replace("VERSION = 1", "VERSION = 2"))
    os.utime(path, ns=(1, 1))
    assert all(before[label] != key for label, key in keys_of().items())


def test_where_a_text_lies_does_not_matter_but_its_bytes_do(fake_root: Path) -> None:
    def root(text: str) -> dict[str, Any]:
        recipe = load(["recipe=small.yaml", f"data.training.source={text}"])
        return outline.inputs(recipe, fake_root / "recipes/demo/model", manifest.hash_file)

    (fake_root / "copy.txt").write_bytes((fake_root / "training.txt").read_bytes())
    (fake_root / "other.txt").write_text("other")
    assert root("training.txt") == root("copy.txt") != root("other.txt")


def test_how_a_dataset_comes_does_not_matter_but_its_revision_does(fake_root: Path) -> None:
    def root(*more: str) -> dict[str, Any]:
        recipe = load(["recipe=small.yaml", "data.training.source=some/dataset", *more])
        return outline.inputs(recipe, fake_root / "recipes/demo/model", manifest.hash_file)

    assert root() == root("data.training.stream=true") != root("data.training.revision=v2")


@pytest.mark.parametrize("name", ["chat_template.jinja", "added_tokens.json", "generation_config.json", "LICENSE"])
def test_what_travels_with_the_weights_decides_the_keys(fake_root: Path, name: str) -> None:
    recipe, model = load(["recipe=small.yaml"]), fake_root / "recipes/demo/model"
    before = outline.inputs(recipe, model, manifest.hash_file)
    (model / name).write_text("{}")
    assert outline.inputs(recipe, model, manifest.hash_file) != before


def test_variants_and_until_shape_the_outline(fake_root: Path) -> None:
    names = list(keys_of("variants={a: {train: null}, b: {export: {formats: [awq, dense]}}}"))
    assert names == [
        "a/calibrate", "a/export/compressed_tensors",
        "b/calibrate", "b/train", "b/export/awq", "b/export/dense",
        "gate",
    ]  # fmt: skip
    assert list(keys_of("until=train")) == ["calibrate", "train"]
    keys = keys_of("variants={a: {}, b: {}}")
    assert keys["a/calibrate"] == keys["b/calibrate"] and len(set(keys.values())) < len(keys)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)
contents = st.dictionaries(st.text(max_size=2), json_values, max_size=4)


@given(contents, contents)
def test_equal_keys_mean_equal_content(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert (stage_key("s", a, []) == stage_key("s", b, [])) == (
        json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)
    )
    assert stage_key("s", a, []) == stage_key("s", dict(reversed(a.items())), [])
    assert len({stage_key("s", a, []), stage_key("t", a, []), stage_key("s", a, ["p"])}) == 3
