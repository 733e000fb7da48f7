"""Which methods go with which scheme: what has no use is an error of the recipe, not of the stage that meets it."""

from __future__ import annotations

import re

import pytest

from qat.recipe import Recipe, RecipeError, load

INT8_BOTH = "{weights: {dtype: int8, per: channel}, inputs: {dtype: int8, per: token, dynamic: true}}"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("calibrate.range=activation", "calibrate.range: activation does not do fp8_e4m3; these do: max"),
        ("train={learn: {scale: 1e-3}}", "train.learn.scale: scale is not there to be learned in fp8_e4m3; set train"),
    ],
)
def test_what_fp8_has_no_use_for_is_an_error(override: str, line: str) -> None:
    fp8 = "{weights: {dtype: fp8_e4m3}, inputs: {dtype: fp8_e4m3, per: token, dynamic: true}}"
    good = ["recipe=micro.yaml", f"scheme={fp8}", "calibrate.range=max", "train=null"]
    assert load(good).scheme.kinds == {"fp8-channel"}
    with pytest.raises(RecipeError) as caught:
        load([*good, override])
    assert line in str(caught.value)


@pytest.mark.parametrize(
    ("transform", "scheme", "line"),
    [
        (
            "awq",
            INT8_BOTH,
            "awq is not for quantized inputs (scheme.inputs is int8-token-dynamic); these are: none, sm",
        ),
        ("smoothquant", "{weights: {dtype: int8, per: channel}}", "smoothquant is not for plain inputs (scheme.inputs"),
    ],
)
def test_a_transform_that_has_no_use_is_an_error_of_the_recipe(transform: str, scheme: str, line: str) -> None:
    recipe = ["recipe=micro.yaml", f"scheme={scheme}", "calibrate.range=mse", "train=null"]
    assert load(recipe).calibrate.transform.name == "none"
    for arguments in (
        [*recipe, f"calibrate.transform={transform}"],
        ["recipe=micro.yaml", f"variants.a={{scheme: {scheme}, train: null, calibrate: {{transform: {transform}}}}}"],
    ):
        with pytest.raises(RecipeError, match=re.escape(f"calibrate.transform: {line}")):
            load(arguments)


STATIC = "{weights: {dtype: fp8_e4m3, per: tensor}, inputs: {dtype: fp8_e4m3, per: tensor}}"


def test_the_range_of_static_inputs_is_chosen_apart_from_that_of_weights() -> None:
    static = ["recipe=micro.yaml", f"scheme={STATIC}", "calibrate.range=max", "train=null"]
    recipe = load([*static, "calibrate.inputs={name: mse, candidates: 100}"])
    assert recipe.model_dump()["calibrate"]["inputs"] == {"name": "mse", "candidates": 100, "smallest": 0.004}
    assert Recipe.model_validate(recipe.model_dump()) == recipe
    assert load(static).calibrate.inputs.name == "max"
    for wrong, line in (
        ("activation", "calibrate.inputs: activation does not do activations in fp8_e4m3; these do: kl, max, mse"),
        ("{name: kl, sweeps: 3}", "calibrate.inputs.sweeps: unknown key"),
        ("percentil", "there is no calibrate/range/percentil.py, did you mean 'percentile'?"),
    ):
        with pytest.raises(RecipeError, match=re.escape(line)):
            load([*static, f"calibrate.inputs={wrong}"])


def test_a_range_of_inputs_needs_static_inputs() -> None:
    dynamic = "{weights: {dtype: fp8_e4m3}, inputs: {dtype: fp8_e4m3, per: token, dynamic: true}}"
    for overrides in ([], [f"scheme={dynamic}", "calibrate.range=max", "train=null"]):
        line = "calibrate.inputs: kl, but the scheme has no static inputs and no kv_cache; leave it out"
        with pytest.raises(RecipeError, match=re.escape(line)):
            load(["recipe=micro.yaml", *overrides, "calibrate.inputs=kl"])


def test_zero_points_are_learned_of_all_linears_or_none() -> None:
    half = "scheme.overrides={'*.down_proj': {dtype: int4, group_size: 32, symmetric: false}}"
    with pytest.raises(RecipeError, match=r"train\.learn\.zero: symmetric int4 has no zero points"):
        load(["recipe=micro.yaml", half, "train.learn=zero"])


def test_percentile_is_for_inputs_only() -> None:
    with pytest.raises(RecipeError, match=r"calibrate\.range: percentile does not do int4"):
        load(["recipe=micro.yaml", "calibrate.range=percentile"])
