"""Mixed precision: the choice against all choices, the estimate against models that really are quantized."""

from __future__ import annotations

import csv
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig
from typer.testing import CliRunner

from calibrate import budget, mixed
from gate.readers import open_export
from qat import mixed as command
from qat import report
from qat.artifact import Artifact, save_tensors
from qat.checkpoint import SafetensorsFolder
from qat.cli import app
from qat.groups import Group, overrides, stored_bits
from qat.model import Model
from qat.recipe import load
from qat.scheme import Scheme, TensorFormat
from tests.artifacts import config_of, make

INT4, INT8 = TensorFormat(dtype="int4", group_size=32), TensorFormat(dtype="int8")
CHOICES = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40)), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(groups=st.lists(CHOICES, min_size=1, max_size=5), spare=st.integers(0, 80), unit=st.sampled_from([1, 96, 2**20]))
def test_no_choice_within_the_budget_is_better(groups: list[list[tuple[int, int]]], spare: int, unit: int) -> None:
    losses = [[float(loss) for loss, _ in group] for group in groups]
    bits = [[size * unit for _, size in group] for group in groups]
    limit = sum(map(min, bits)) + spare * unit

    def size(choice: tuple[int, ...] | list[int]) -> int:
        return sum(sizes[i] for sizes, i in zip(bits, choice, strict=True))

    def loss(choice: tuple[int, ...] | list[int]) -> float:
        return sum(values[i] for values, i in zip(losses, choice, strict=True))

    every = itertools.product(*(range(len(group)) for group in groups))
    found = budget.allocate(losses, bits, limit)
    assert size(found) <= limit
    assert loss(found) == min(loss(choice) for choice in every if size(choice) <= limit)


def test_sizes_without_a_common_unit_stay_within_the_budget() -> None:
    random = torch.Generator().manual_seed(0)
    sizes = [[10**9 + int(x), 2 * 10**9 + int(y)] for x, y in torch.randint(0, 10**8, (40, 2), generator=random)]
    losses = [[1 + x, 0.0] for x in torch.rand(40, generator=random).tolist()]
    limit = sum(map(min, sizes)) + 9 * 10**9
    found = budget.allocate(losses, sizes, limit)
    used = sum(size[i] for size, i in zip(sizes, found, strict=True))
    assert limit - 2 * 10**9 < used <= limit


def test_a_budget_under_the_smallest_choices_is_refused() -> None:
    with pytest.raises(ValueError, match=r"29 bits are fewer than the 30"):
        budget.allocate([[1.0, 0.0], [1.0]], [[10, 20], [20]], 29)


SIZES = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}


def small(folder: Path, moe: bool) -> torch.nn.Module:
    """Random weights, large enough that blocks matter, saved as on the hub."""
    torch.manual_seed(0)
    config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2) if moe else LlamaConfig(**SIZES)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.5 if "lm_head" in name else 0.25)
    model.save_pretrained(folder, save_original_format=True)
    return model


def gradient(whole: torch.nn.Module, name: str) -> Tensor:
    """The gradient at a linear of the hub checkpoint; Hugging Face's Mixtral holds its experts stacked."""
    if ".experts." not in name:
        return whole.get_submodule(name).weight.grad
    block, _, expert = name.replace("block_sparse_moe", "mlp").partition(".experts.")
    number, leaf = expert.split(".")
    stacked = whole.get_submodule(f"{block}.experts")
    if leaf == "w2":
        return stacked.down_proj.grad[int(number)]
    return stacked.gate_up_proj.grad[int(number)].chunk(2)[leaf == "w3"]


@pytest.mark.parametrize("moe", [False, True])
def test_products_equal_those_with_the_gradient_of_the_whole_model(tmp_path: Path, moe: bool) -> None:
    whole = small(tmp_path, moe)
    model = Model(whole.config, SafetensorsFolder(tmp_path))
    windows = torch.randint(0, 48, (3, 7), generator=torch.Generator().manual_seed(1))
    groups = [model.arch.fused(index) for index in range(2)]
    flat = [group for block in groups for group in block]
    generator = torch.Generator().manual_seed(2)
    errors = {
        name: torch.randn(2, *model.root.get_submodule(name).weight.shape, generator=generator).bfloat16()
        for group in flat
        for name in group
    }
    found, squares = mixed.products(model, windows, groups, errors.__getitem__, seed=5, batch=2, budget=2**30)
    waves, _ = mixed.products(model, windows, groups, errors.__getitem__, seed=5, batch=1, budget=1)
    assert found.shape == (3, len(flat), 2)

    generator = torch.Generator().manual_seed(5)
    batches = [1, 1, 1] if moe else [2, 1]  # one call of the generator for each
    drawn = torch.cat([torch.rand(size * 7, 1, generator=generator) for size in batches]).view(3, 7, 1)
    for window in range(3):
        whole.requires_grad_(True).zero_grad()
        logp = whole(windows[window : window + 1]).logits[0].log_softmax(-1)
        token = (logp.exp().cumsum(-1) < drawn[window]).sum(-1, keepdim=True)
        logp.gather(-1, token).sum().backward()
        for number, group in enumerate(flat):
            slope = sum((errors[name].float() * gradient(whole, name)).sum((1, 2)) for name in group).double()
            torch.testing.assert_close(found[window, number], slope, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(waves[window, number], slope, rtol=1e-3, atol=1e-3)
            square = sum((errors[name].float() * gradient(whole, name)).square().sum((1, 2)) for name in group).double()
            torch.testing.assert_close(squares[window, number], square, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("aligned", [False, True])
def test_the_estimate_is_the_kl_of_a_model_with_that_group_changed(tmp_path: Path, aligned: bool) -> None:
    """Against Hugging Face's model, on the same text, for errors of very different size.

    aligned: every weight of a linear moves by the same amount, which is far from independent errors.
    """
    whole = small(tmp_path, moe=False).double()
    model = Model(whole.config, SafetensorsFolder(tmp_path))
    windows = torch.randint(0, 48, (256, 8), generator=torch.Generator().manual_seed(1))
    groups = [model.arch.fused(index) for index in range(2)]
    flat = [group for block in groups for group in block]
    errors = {}
    for i, name in enumerate(name for group in flat for name in group):
        shape, size = (1, *model.root.get_submodule(name).weight.shape), 0.002 * 2 ** (i % 5)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(i))
        errors[name] = size * (torch.ones(shape) if aligned else noise)
    plain, squares = mixed.products(model, windows, groups, errors.__getitem__, seed=5, batch=64, budget=2**30)
    estimate = mixed.kl(plain, squares, 8)[:, 0]
    found = []
    with torch.no_grad():
        p = whole(windows).logits.log_softmax(-1)
        for group in flat:
            for name in group:
                whole.get_submodule(name).weight += errors[name][0]
            q = whole(windows).logits.log_softmax(-1)
            found.append((p.exp() * (p - q)).sum(-1).mean())
            for name in group:
                whole.get_submodule(name).weight -= errors[name][0]
    true = torch.stack(found)
    assert true.max() > 20 * true.min()
    one_draw = math.sqrt(2 / 256)  # the relative standard error of a mean of 256 squares
    assert (estimate / true - 1).abs().max() < 4 * one_draw
    assert (estimate / true - 1).abs().mean() < 1.5 * one_draw
    order = torch.stack([estimate.argsort().argsort(), true.argsort().argsort()]).double()
    assert torch.corrcoef(order)[0, 1] > 0.9


def test_ratios_are_drawn_together_only_as_far_as_noise_explains() -> None:
    generator = torch.Generator().manual_seed(0)
    size = torch.logspace(-3, 0, 40, dtype=torch.float64)[:, None]

    def worst(ratio: Tensor) -> float:
        true = ratio[:, None] * size / 2
        plain = (2 * true).sqrt() * torch.randn(64, 40, 1, generator=generator, dtype=torch.float64)
        return (mixed.kl(plain, size.expand(64, -1, -1), 1) / true).log().abs().max().item()

    assert worst(torch.full((40,), 0.3, dtype=torch.float64)) < 0.15  # alone each would be off by 0.18, typically
    assert worst(torch.logspace(-1, 1, 40, dtype=torch.float64)) < 1.2


def test_a_group_that_loses_nothing_adds_nothing() -> None:
    plain, squares = torch.ones(4, 3, 2), torch.ones(4, 3, 2)
    plain[:, 1], squares[:, 1] = 0, 0
    plain[:, 2, 1], squares[:, 2, 1] = 0, 0
    found = mixed.kl(plain.double(), squares.double(), 1)
    assert torch.isfinite(found).all() and not found[1].any() and found[2, 1] == 0 and found[2, 0] > 0


def test_bits_are_those_that_the_gate_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """End to end: measure, choose, run what was written, and read the export back."""
    monkeypatch.chdir(tmp_path)
    common = [f"output={tmp_path / 'runs'}", "train=null", "recipe=micro.yaml"]
    own = ["bits=5.2", "out=mix.yaml", "candidates=[{dtype: int8}, skip]"]
    assert command.main([*common, *own]) == 0
    snippet = yaml.safe_load((tmp_path / "runs/micro-sensitivity/overrides.yaml").read_text())
    assert load(["recipe=mix.yaml"]).scheme == Scheme.model_validate(
        {**snippet["scheme"], "weights": {"dtype": "int4", "group_size": 32}}
    )
    with (tmp_path / "runs/micro-sensitivity/sensitivity.csv").open() as f:
        rows = [row for row in csv.DictReader(f) if row["chosen"] == "1"]
    weights = sum(int(row["weights"]) for row in rows)
    bits = sum(int(row["weights"]) * float(row["bits_per_weight"]) for row in rows) / weights
    assert bits <= 5.2 and {row["candidate"] for row in rows} > {"int4-g32"}

    from qat.train import main

    assert main(["recipe=mix.yaml"]) == 0
    summary = json.loads((tmp_path / "runs/mix/summary.json").read_text())
    export = open_export(tmp_path / "runs/mix" / summary["exports"]["compressed_tensors"]["path"])
    quantized = sum(math.prod(export.shapes[f"{name}.weight"]) for name in export.linears)
    stored = export.bits_per_weight * quantized - 128 * len(export.linears)  # weight_shape is two int64
    assert stored + 16 * (weights - quantized) == pytest.approx(bits * weights)

    stage = next((tmp_path / "runs/micro-sensitivity").glob("sensitivity-*"))
    before = stage.stat().st_mtime_ns
    assert command.main([*common, "bits=4.6"]) == 0
    assert stage.stat().st_mtime_ns == before  # another candidate list is another stage; this one is left alone
    assert command.main([*common, "candidates=[{dtype: int8}, skip]"]) == 0
    assert stage.stat().st_mtime_ns == before


def test_progress_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TARE_LOG", "TARE_PROGRESS"):  # the command sets them; this brings them back
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(report, "FIRST_LINE_SECONDS", 0)
    recipe = ["recipe=micro.yaml", f"output={tmp_path}", "candidates=[skip]", "fresh=calibrate"]
    shown = CliRunner().invoke(app, ["sensitivity", *recipe])
    silent = CliRunner().invoke(app, ["sensitivity", "--no-progress", *recipe])
    assert (shown.exit_code, silent.exit_code) == (0, 0)
    assert "block 1/2" in shown.output and "block 1/2" not in silent.output
    assert "sums over all groups" in silent.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["export.formats=awq"], "awq cannot hold int4 and int8"),
        (["bits=4.4"], "bits=4.4 is below 4.5000"),
        (["bits=many"], "bits: 'many' is not a number"),
        (["out=x.yaml"], "add bits=4.5"),
        (["bits=4.5", "out=nowhere/x.yaml"], "out: nowhere is no folder that this user may write in"),
        (["candidates=int5"], "candidates: 'int5' is neither skip nor a format"),
        (["candidates=[]"], "nothing to choose from beside int4-g32"),
        (["variants={a: {}}"], "variants={}"),
        (["scheme.overrides={'*': {dtype: int8}}"], "scheme.overrides: these are what the command chooses"),
        (
            ["scheme={weights: {dtype: int8}, inputs: {dtype: int8, per: token, dynamic: true}}", "train=null"],
            "scheme.inputs: only",
        ),
    ],
)
def test_refused_before_anything_is_calibrated(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["recipe=micro.yaml", f"output={tmp_path}", *arguments]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.glob("*/calibrate-*"))


@pytest.mark.parametrize(
    ("weights", "labels"),
    [
        ("{dtype: int4, group_size: 128}", ["int4-g128", "int4-g64", "int4-g32", "int8-g128", "skip"]),
        ("{dtype: int4, group_size: 96}", ["int4-g96", "int8-g96", "skip"]),
        ("{dtype: int4}", ["int4-channel", "int8-channel", "skip"]),
        ("{dtype: int8}", ["int8-channel", "skip"]),
    ],
)
def test_formats_to_choose_from(weights: str, labels: list[str]) -> None:
    base = load(["recipe=micro.yaml", f"scheme.weights={weights}", "export.formats=compressed_tensors"])
    assert list(command._candidates(base, None)) == labels


def test_awq_may_leave_groups_as_they_are(tmp_path: Path) -> None:
    arguments = ["recipe=micro.yaml", f"output={tmp_path}", "export.formats=awq", "candidates=skip", "bits=6"]
    assert command.main(arguments) == 0
    scheme = yaml.safe_load((tmp_path / "micro-sensitivity/overrides.yaml").read_text())["scheme"]
    assert not scheme["overrides"] and len(scheme["skip"]) > 1


def test_factors_of_a_transform_are_taken_out(tmp_path: Path) -> None:
    """A stored weight that is exactly the parent's with rows and columns multiplied has no error."""
    name, by_row, by_column = "model.layers.1.mlp.up_proj", 8.0, torch.logspace(-2, 2, 64, 2)
    stored = make(tmp_path, config_of("llama")).get(f"{name}.weight")
    vectors = {f"{name}.weight#in": by_column, f"{name}.weight#out": torch.full((len(stored),), by_row)}
    save_tensors(vectors, tmp_path / "transform-00001.safetensors")
    model: Any = SimpleNamespace(tensors=SimpleNamespace(get=lambda _: (stored - 8 * 0.25) / by_row / by_column))
    expected = (0.25 / by_column).expand_as(stored)
    torch.testing.assert_close(command._error(Artifact(tmp_path), model, name), expected)


def test_experts_are_named_by_one_pattern() -> None:
    names = [f"model.layers.0.mlp.experts.{i}.up_proj" for i in range(3)]
    groups = [Group(names, "model.layers.0.mlp.experts.*", 3, {}), Group(["a.o_proj"], None, 1, {})]
    found = overrides(groups, ["int8", "skip"], {"int4": INT4, "int8": INT8, "skip": None}, Scheme(weights=INT4))
    scheme = Scheme(weights=INT4, **found)
    assert [scheme.format_of(name) for name in names] == [INT8] * 3
    assert scheme.format_of("a.o_proj") is None and scheme.skip[0] == "lm_head"


@pytest.mark.parametrize("fmt", [INT4, INT8, TensorFormat(dtype="int4", group_size=16, symmetric=False)], ids=str)
def test_stored_bits_count_every_code_and_scale(fmt: TensorFormat) -> None:
    groups = 8 * 64 // (fmt.group_size or 64)
    assert stored_bits(fmt, 8, 64) == 8 * 64 * fmt.bits + groups * (16 if fmt.symmetric else 20)
    assert stored_bits(None, 8, 64) == 8 * 64 * 16
