"""The recipe: what is accepted, what is refused, and in which words."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from qat.recipe import Recipe, RecipeError, load

REPOSITORY = Path(__file__).resolve().parent.parent
FP8 = (
    "scheme={weights: {dtype: fp8_e4m3, per: tensor}, inputs: {dtype: fp8_e4m3, per: tensor}}",
    "train=null",
    "export.formats=[modelopt]",
)
KV = "scheme.kv_cache={dtype: fp8_e4m3, per: tensor}"


def complaint(*overrides: str) -> list[str]:
    """The lines of the error that small.yaml with these overrides raises, after the first."""
    with pytest.raises(RecipeError) as caught:
        load(["recipe=small.yaml", *overrides])
    return [line.strip() for line in str(caught.value).splitlines()[1:]]


def test_a_recipe_is_its_own_dump(fake_root: Path) -> None:
    recipe = load(["recipe=small.yaml", "variants={a: {train: null}, b: {calibrate: {range: {grid: 9}}}}"])
    assert Recipe.model_validate(recipe.model_dump()) == recipe
    assert Recipe.model_validate(json.loads(recipe.model_dump_json())) == recipe
    assert recipe.model_dump()["calibrate"]["range"] == {"name": "mse", "grid": 30, "norm": "l2"}
    assert recipe.name == "small" and recipe.folder == Path("runs/small")


@pytest.mark.parametrize(
    "key", ["gate.perplexity.max_relative_increase", "compute.activation_gb", "data.calibration.max_mb", "train.enough"]
)
def test_numbers_are_finite(fake_root: Path, key: str) -> None:
    for number in (".inf", ".nan"):
        (line,) = complaint(f"{key}={number}")
        assert line.startswith(f"{key}: input should be a finite number")


def test_all_errors_come_at_once_with_their_paths_and_a_suggestion(fake_root: Path) -> None:
    lines = complaint(
        "modle.x=1",
        "scheme.weights.group_sise=64",
        "calibrate.range=msee",
        "calibrate.round={name: nearest, dampp: 1}",
        "train.steps=ten",
        "train.warmpu=3",
        "train.learn.bais=1",
        "gate.perplexity.max_relative_incraese=1",
        "gate.lnt={}",
        "nonsense",
    )
    expected = {
        "modle": "did you mean 'model'?",
        "scheme.weights.group_sise": "did you mean 'group_size'?",
        "calibrate.range": "there is no calibrate/range/msee.py, did you mean 'mse'? (known: activation, max, mse)",
        "calibrate.round.dampp": "unknown key (known: none)",
        "train.steps": "input should be a valid integer, unable to parse string as an integer, got 'ten'",
        "train.warmpu": "did you mean 'warmup'?",
        "train.learn.bais": "did you mean 'bias'?",
        "gate.perplexity.max_relative_incraese": "did you mean 'max_relative_increase'?",
        "gate.lnt": "there is no gate/lnt.py, did you mean 'lint'?",
        "nonsense": "not of the form dotted.key=value",
    }
    assert {line.split(": ")[0] for line in lines} == set(expected)
    for line in lines:
        assert expected[line.split(": ")[0]] in line


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train=null", "train.steps=5"], "train is null, which has no keys; give it whole: train='{steps: 5}'"),
        (["calibrate.range=mse", "calibrate.range.grid=5"], "calibrate.range='{name: mse, grid: 5}'"),
        (["train.teacher=foo"], "train.teacher: input should be 'resident' or 'hidden', or a valid integer, got 'foo'"),
        (["train.teacher=0"], "train.teacher: input should be 'resident' or 'hidden', or greater than 0, got 0"),
        (
            ["train=[{steps: 9}, {checkpoint: x}]"],
            "train.1.checkpoint: input should be 'auto', or a valid integer, got 'x'",
        ),
        (["train.cuda_graph=maybe"], "train.cuda_graph: input should be 'auto', or a valid boolean, got 'maybe'"),
        (["data.calibration=null"], "data.calibration: input should be a mapping of keys, got null"),
        (["scheme.weights=int4"], "scheme.weights: input should be a mapping of keys, got 'int4'"),
        (["scheme.skip=5"], "scheme.skip: input should be a valid list, got 5"),
        (["variants.int={train: {teacher: x}}"], "variants.int.train.teacher: input should be 'resident' or"),
        (["train.micro_batch=3"], "train.micro_batch: 3 does not divide batch, which is 8"),
        (["train.warmup=20"], "train.warmup: 20 leaves no step at the full rate"),
        (["train.0.steps=5"], "train.0.steps: train is one section, not a list; set train.steps=5"),
        (["train.0={steps: 5}"], "train.0: train is one section, not a list; set train={steps: 5}, or train='[...]'"),
        (["train.learn=zeros"], "train.learn.zeros: unknown key, did you mean 'zero'?"),
        (["train.learn={bias: 0}"], "train.learn.bias: input should be greater than 0, got 0"),
        (["train.learn={bias: null}"], "train.learn: nothing is learned; name one of qat/learn, or set train to null"),
        (["train.loss={kl: null}"], "train.loss: there is no loss; name one or more of kl, ce, hidden"),
        (["train.loss=[kl, ce]"], "train.loss: is one of kl, ce, hidden, or a mapping of them to weights, not ['kl'"),
        (["calibrate.range.grid=0"], "calibrate.range.grid: input should be greater than 0, got 0"),
        (["calibrate.range=[1]"], "calibrate.range: [1] is not the name of a plugin"),
        (["calibrate.round=_helper"], "there is no calibrate/round/_helper.py"),
        (["data.training=null"], "data.training: train needs text"),
        (["data.evaluation=null"], "data.evaluation: the gate needs held-out text"),
        (["data.evaluation.source=training.txt"], "data.evaluation.source: training.txt is also the training text"),
        (["data.evaluation.source=calibration.txt"], "data.evaluation.source: calibration.txt is also the calibration"),
        (["data.training.source=no.txt"], "data.training.source: no.txt does not exist"),
        (["model.source=/no/where"], "model.source: /no/where does not exist"),
        (["gate=null", "until=gate"], "until: gate, but this recipe has no gate section"),
        (["name=../up"], "name: string should match pattern"),
        (["export.formats=[awq, awq]"], "export.formats: each only once, got awq, awq"),
        (["export.formats=[]"], "export.formats: list should have at least 1 item"),
        (["export.formats=modelopt"], "modelopt cannot hold int4; these can: awq, compressed_tensors, dense"),
        (["export.engines=[vllm, trtllm]"], "export.engines: trtllm loads none of the formats asked for"),
        (
            ["scheme.weights.symmetric=false"],
            "export.formats: compressed_tensors with int4-asym is not loaded by vllm; it is by: none",
        ),
        (
            ["export.formats=awq", "scheme.overrides={'*.down_proj': {group_size: 64}}"],
            "awq cannot hold int4 with several group sizes; these can: compressed_tensors, dense",
        ),
        (
            ["export.formats=awq", "scheme.overrides={'*.down_proj': {dtype: int8}}"],
            "awq cannot hold int4 and int8; these can: compressed_tensors, dense",
        ),
        (
            ["export.formats=[awq]", KV],
            "awq cannot hold int4 with KV-cache scales; these can: compressed_tensors",
        ),
        (
            [*FP8, KV, "export.engines=[vllm, trtllm]"],
            "engines: trtllm loads none of the formats asked for; of fp8-tensor with KV-cache scales it loads: none",
        ),
        ([*FP8, "export.formats=awq"], "awq cannot hold fp8-tensor; these can: compressed_tensors, dense, modelopt"),
    ],
)
def test_what_cannot_work_is_refused(fake_root: Path, overrides: list[str], words: str) -> None:
    assert any(words in line for line in complaint(*overrides)), complaint(*overrides)


def test_a_path_of_an_error_has_the_keys_of_the_recipe_only(fake_root: Path) -> None:
    wrong = [
        f"train.{key}={value}" for key in ("teacher", "checkpoint", "cuda_graph") for value in ("x", "[1]", "-1.5")
    ]
    for one in (*wrong, "compute=null", "variants={a: 3}", "train=3", "gate.lint=3", "export.engines=3"):
        lines = complaint(one)
        assert len(lines) == 1, lines
        path, _, told = lines[0].partition(": ")
        assert path.replace(".0", "") in (one.partition("=")[0], "variants.a"), lines
        assert not re.search("literal|constrained|dictionary|instance of", lines[0]), told


def test_what_can_work_is_not_refused(fake_root: Path) -> None:
    load(["recipe=small.yaml", *FP8, "export.engines=[vllm, trtllm]"])
    load(["recipe=small.yaml", "export.formats=dense", "export.engines=trtllm"])
    load(["recipe=small.yaml", "scheme.overrides={'*.down_proj': {group_size: 64}}"])
    load(["recipe=small.yaml", "gate=null", "data.evaluation=null"])
    assert load(["recipe=small.yaml", "train.learn=bias"]) == load(["recipe=small.yaml", "train.learn=[bias]"])
    load(["recipe=small.yaml", "model.source=someone/a-hub-model", "data.calibration.source=someone/a-dataset"])


def test_variants_are_whole_recipes(fake_root: Path) -> None:
    fp8 = "{dtype: fp8_e4m3, per: tensor}"
    recipe = load(
        [
            "recipe=small.yaml",
            f"variants.fp8={{scheme: {{weights: {fp8}, inputs: {fp8}}}, train: null, export: {{formats: modelopt}}}}",
            "variants.wide={calibrate: {range: {grid: 40}}, train: {learn: {scale: null}}}",
            "variants.plain={calibrate: {range: {name: activation}}}",
        ]
    )
    fp8_recipe, wide, plain = (one for _, one in recipe.by_variant)
    assert [name for name, _ in recipe.by_variant] == ["fp8", "wide", "plain"]
    assert fp8_recipe.train is None and fp8_recipe.scheme.kinds == {"fp8-tensor"}
    assert wide.model_dump()["calibrate"]["range"] == {"name": "mse", "grid": 40, "norm": "l2"}
    assert wide.train and wide.model_dump()["train"]["learn"] == {"bias": {"rate": 0.003}} and wide.train.steps == 20
    assert plain.calibrate.range.name == "activation" and not plain.variants
    assert load(["recipe=small.yaml"]).by_variant == [(None, load(["recipe=small.yaml"]))]


def test_errors_of_a_variant_carry_its_path_and_those_of_the_base_come_once(fake_root: Path) -> None:
    lines = complaint(
        "train.seed=-1",
        "variants.a={train: {steps: -4}}",
        "variants.b={export: {formats: modelopt}, calibrate: {range: {grdi: 3}}}",
        "variants.c={data: {}}",
        "variants.d/e={}",
    )
    assert sorted(line.split(": ")[0] for line in lines) == [
        "train.seed",
        "variants.a.train.steps",
        "variants.b.calibrate.range.grdi",
        "variants.c.data",
        "variants.d/e",
    ]
    assert complaint("variants.b={export: {formats: modelopt}}") == [
        "variants.b.export.formats: modelopt cannot hold int4; these can: awq, compressed_tensors, dense",
        "variants.b.export.engines: vllm loads none of the formats asked for; "
        "of int4 it loads: awq, compressed_tensors, dense",
    ]


def test_files_that_are_no_recipe(fake_root: Path) -> None:
    for text, words in [
        ("a: 1\nb: 2\na: 3\n", "'a' stands twice, in line 1 and in line 3"),
        ("a: {b: 1, b: 2}\n", "'b' stands twice, in line 1 and in line 1"),
        ("- 1\n", "holds a list, not a mapping"),
        ("", "holds a NoneType, not a mapping"),
        ("a: [1\n", "not YAML"),
        ("a: !!python/name:os.system x\n", "not YAML"),
    ]:
        (fake_root / "odd.yaml").write_text(text)
        with pytest.raises(RecipeError, match=r"odd\.yaml") as caught:
            load(["recipe=odd.yaml"])
        assert words in str(caught.value)
    with pytest.raises(RecipeError, match=r"nor recipes/nope\.yaml \(known: .*small\.yaml\)$"):
        load(["recipe=nope.yaml"])
    with pytest.raises(RecipeError, match=r"did you mean 'small\.yaml'"):
        load(["recipe=smal.yaml"])
    with pytest.raises(RecipeError, match=r"give one recipe=FILE, got 0; recipes/ has: small\.yaml"):
        load(["train.steps=3"])
    with pytest.raises(RecipeError, match="got 2"):
        load(["recipe=small.yaml", "recipe=small.yaml"])


def test_paths_are_found_here_then_in_the_repository_then_beside_the_recipe(
    fake_root: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere, here = tmp_path_factory.mktemp("elsewhere"), tmp_path_factory.mktemp("here")
    values = yaml.safe_load((fake_root / "recipes" / "small.yaml").read_text())
    (elsewhere / "own.yaml").write_text(yaml.safe_dump(values))
    (elsewhere / "training.txt").write_text("beside the recipe")  # the repository has one too and comes first
    (elsewhere / "evaluation.txt").write_text("beside the recipe")
    (fake_root / "evaluation.txt").unlink()
    (here / "calibration.txt").write_text("here")
    monkeypatch.chdir(here)
    data = load([f"recipe={elsewhere / 'own.yaml'}"]).data
    assert data.calibration.source == "calibration.txt"
    assert data.training and data.evaluation
    assert Path(data.training.source).read_text() == "text for training\n"
    assert Path(data.evaluation.source).read_text() == "beside the recipe"
    assert not Path(data.evaluation.source).is_absolute()


def test_warmup_follows_the_steps_unless_given(fake_root: Path) -> None:
    def warmup(*overrides: str) -> int:
        train = load(["recipe=small.yaml", *overrides]).train
        assert train
        return train.warmup

    assert [warmup(f"train.steps={n}") for n in (3, 50, 100, 400)] == [0, 5, 10, 10]
    assert warmup("train.steps=3", "train.warmup=2") == 2


@pytest.mark.parametrize("file", sorted((REPOSITORY / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_recipe_is_valid(file: Path) -> None:
    needs_a_file = [f"model.source={file}"] if "gguf" in file.read_text() else []
    recipe = load([f"recipe={file}", *needs_a_file])
    for _, one in recipe.by_variant:
        assert one.scheme.kinds


def test_reading_a_recipe_imports_no_torch() -> None:
    code = "import sys, qat.recipe as r; r.load(['recipe=demo.yaml']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_only_bounds_of_the_gate_may_differ_between_variants(fake_root: Path) -> None:
    def with_gate(gate: str) -> list[str]:
        return ["recipe=small.yaml", f"variants={{a: {{}}, b: {{gate: {gate}}}}}"]

    recipes = dict(load(with_gate("{perplexity: {max_relative_increase: 0.01}}")).by_variant)
    bounds = {name: one.model_dump()["gate"]["perplexity"]["max_relative_increase"] for name, one in recipes.items()}
    assert bounds == {"a": 0.05, "b": 0.01}
    for gate, why in (
        ("{perplexity: {windows: 3}}", "variants.b.gate.perplexity.windows: cannot differ"),
        ("{divergence: {max_kl: 1}}", "variants.b.gate.divergence: is not in the gate section"),
        ("null", "variants.b.gate: every variant is judged"),
    ):
        with pytest.raises(RecipeError, match=why):
            load(with_gate(gate))
