"""What a plan says is what happens, and saying it loads nothing heavy."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from safetensors.torch import save_file
from transformers import MixtralConfig
from typer.testing import CliRunner

from qat import manifest, outline, plan, sizes
from qat.cli import app
from qat.recipe import RecipeError, load
from qat.stages import Run
from tests.test_observe import make as make_model

REPOSITORY = Path(__file__).resolve().parent.parent
HIDDEN, INNER, VOCABULARY, BLOCKS = 128, 256, 96, 2
CONFIG = {"model_type": "llama", "num_hidden_layers": BLOCKS, "vocab_size": VOCABULARY, "hidden_size": HIDDEN}
SHAPES = {
    "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    **{f"model.layers.{i}.self_attn.{x}_proj.weight": (HIDDEN, HIDDEN) for i in range(BLOCKS) for x in "qkvo"},
    **{f"model.layers.{i}.mlp.{x}_proj.weight": (INNER, HIDDEN) for i in range(BLOCKS) for x in ("gate", "up")},
    **{f"model.layers.{i}.mlp.down_proj.weight": (HIDDEN, INNER) for i in range(BLOCKS)},
    **{f"model.layers.{i}.input_layernorm.weight": (HIDDEN,) for i in range(BLOCKS)},
}


@pytest.fixture
def model(fake_root: Path) -> Path:
    """The demo model of the fake repository: a config and one weight file."""
    folder = fake_root / "recipes" / "demo" / "model"
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def states(*overrides: str) -> dict[str, str]:
    return {row.step.label: row.state for row in plan.make(load(["recipe=small.yaml", *overrides])).rows}


def test_sizes_come_from_the_headers(model: Path) -> None:
    found = sizes.of_folder(model)
    linear = BLOCKS * (4 * HIDDEN * HIDDEN + 3 * INNER * HIDDEN)
    assert found.linear == linear and found.total == sum(math.prod(shape) for shape in SHAPES.values())
    assert found.largest_block == linear // BLOCKS + HIDDEN and found.num_blocks == BLOCKS
    assert found.matmul == linear + VOCABULARY * HIDDEN
    assert found.file_bytes == (model / "model.safetensors").stat().st_size


def test_a_gguf_header_is_read_like_the_gguf_package_writes_it(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_token_list(["a", "bc", "déf"])
    writer.add_array("numbers", [1.5, 2.5])
    writer.add_bool("flag", True)
    writer.add_uint64("large", 2**40)
    shapes = {
        "token_embd.weight": (VOCABULARY, HIDDEN),
        "blk.0.ffn_up.weight": (128, HIDDEN),
        "output_norm.weight": (7,),
    }
    for name, shape in shapes.items():
        writer.add_tensor(name, numpy.zeros(shape, dtype=numpy.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert dict(sizes.gguf_shapes(tmp_path / "m.gguf")) == shapes
    found = sizes.of_gguf(tmp_path / "m.gguf")
    assert (found.linear, found.vocabulary, found.hidden, found.num_blocks) == (128 * HIDDEN, VOCABULARY, HIDDEN, 1)


@pytest.mark.parametrize(
    "content", [b"", b"version https://git-lfs.github.com/spec/v1\n", struct.pack("<Q", 10**12) + b"{}"]
)
def test_a_broken_weight_file_is_named(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors has no safetensors header"):
        plan.make(load(["recipe=small.yaml"]))


def test_the_plan_knows_what_is_finished(model: Path) -> None:
    everything = ["calibrate", "train", "export/compressed_tensors", "gate"]
    assert states() == dict.fromkeys(everything, "run")
    recipe = load(["recipe=small.yaml"])
    with Run(recipe) as run:
        steps = outline.outline(recipe, outline.inputs(recipe, model, run.fingerprints.of))
        first = run.stage(steps[0].name, content=steps[0].content, work=lambda partial: {})
        run.stage(steps[1].name, content=steps[1].content, parents=[first], work=lambda partial: {})
    done = {"calibrate": "reused", "train": "reused"}
    rest = {"export/compressed_tensors": "run", "gate": "run"}
    assert states() == done | rest
    assert states("fresh=train") == done | rest | {"train": "run"}
    assert states("train.steps=21") == done | rest | {"train": "run"}
    (model / "config.json").write_text(json.dumps(CONFIG | {"x": 1}))
    assert set(states().values()) == {"run"}


def test_estimates_cover_what_the_files_take(model: Path) -> None:
    int4, dense = (plan.make(load(["recipe=small.yaml", f"export.formats={f}"])).rows[2] for f in ("awq", "dense"))
    packed = sizes.of_folder(model).linear * (0.5 + 2.5 / 128)
    assert int4.needs and dense.needs
    assert int4.needs.disk_gb * plan.GB >= packed
    assert dense.needs.disk_gb * plan.GB >= 2 * sizes.of_folder(model).total
    int8 = plan.make(load(["recipe=small.yaml", "calibrate.range=activation", "scheme={weights: {dtype: int8}}"])).rows[
        2
    ]
    assert int8.needs and int8.needs.disk_gb * plan.GB >= sizes.of_folder(model).linear
    once, twice = (plan.make(load(["recipe=small.yaml", f"train.steps={n}"])).rows[1].needs for n in (20, 40))
    assert once and twice and once.seconds < twice.seconds and once.memory_gb == twice.memory_gb
    short, long = (plan.make(load(["recipe=small.yaml", f"train.length={n}"])).rows[1].needs for n in (128, 256))
    assert short and long and short.memory_gb < long.memory_gb


def test_the_steps_of_learned_rounding_take_time(model: Path, fake_root: Path) -> None:
    shutil.copy(REPOSITORY / "calibrate" / "round" / "learned.py", fake_root / "calibrate" / "round")

    def seconds(rounding: str) -> float:
        needed = plan.make(load(["recipe=small.yaml", f"calibrate.round={rounding}"])).rows[0].needs
        assert needed
        return needed.seconds

    nearest, some, more = map(seconds, ("nearest", "{name: learned, steps: 100}", "{name: learned, steps: 200}"))
    rate = float(plan.make(load(["recipe=small.yaml"])).rate.split()[0])
    each = 6 * sizes.of_folder(model).linear * 100 * 8 * 16 / rate  # 100 steps of 8 windows of 16 tokens
    assert some - nearest == pytest.approx(each) and more - some == pytest.approx(each)


def test_a_full_disk_is_refused_with_both_numbers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load(["recipe=small.yaml"])
    made = plan.make(recipe)
    plan.check_disk(made, recipe)
    usage = shutil.disk_usage(model)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(
        RecipeError, match=rf"needs {made.disk_gb:.3g} GB more disk and 9\.31e-07 GB is free; .* output="
    ):
        plan.check_disk(plan.make(recipe), recipe)
    refused = CliRunner().invoke(app, ["plan", "recipe=small.yaml"])
    assert refused.exit_code == 2


def test_a_model_that_is_not_here_has_no_sizes_yet(fake_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(fake_root / "hub"))
    made = plan.make(load(["recipe=small.yaml", "model.source=some/model"]))
    assert {row.state for row in made.rows} == {"unknown"} and not any(row.needs for row in made.rows)
    assert made.notes == ["some/model: not on this machine; sizes are unknown until it is downloaded"]


def test_a_downloaded_model_is_found_in_the_hub_cache(
    model: Path, fake_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(fake_root / "hub"))
    repo = fake_root / "hub" / "models--some--model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc123")
    shutil.copytree(model, repo / "snapshots" / "abc123")
    made = plan.make(load(["recipe=small.yaml", "model.source=some/model"]))
    assert {row.state for row in made.rows} == {"run"} and not made.notes


def test_large_inputs_are_not_read_for_a_plan(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "HASH_AT_ONCE", 100)
    monkeypatch.setattr(manifest, "hash_file", lambda path: pytest.fail(f"read {path}"))
    made = plan.make(load(["recipe=small.yaml"]))
    assert {row.state for row in made.rows} == {"unknown"} and all(row.needs for row in made.rows)
    assert "were not hashed yet" in made.notes[0]


def test_planning_loads_no_heavy_library_and_writes_nothing(model: Path, fake_root: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from qat import plugins; plugins.ROOT = Path.cwd();"
        "from qat import plan;"
        "plan.main(['recipe=small.yaml']);"
        "print({'torch', 'transformers', 'numpy', 'accelerate', 'datasets', 'huggingface_hub'} & set(sys.modules))"
    )
    environment = {"PYTHONPATH": str(Path(plan.__file__).parent.parent), "PATH": "/usr/bin:/bin"}
    pipes: dict[str, Any] = {"capture_output": True, "text": True, "check": True}
    done = subprocess.run([sys.executable, "-c", code], cwd=fake_root, env=environment, **pipes)
    assert done.stdout.splitlines()[-1] == "set()"
    assert "calibrate" in done.stdout and "roughly" in done.stdout
    assert not (fake_root / "runs").exists()


def test_the_command_line() -> None:
    runner = CliRunner()
    assert runner.invoke(app, ["--version"]).output.startswith("tare 0.")
    shown = runner.invoke(app, ["run", "--help"])
    assert shown.exit_code == 0
    said = " ".join(shown.output.split())
    assert "scheme.inputs.dtype" not in said and "keys as in scheme.weights" in said
    for check in (path.stem for path in (Path(__file__).parents[1] / "gate").glob("[!_]*.py")):
        assert f"gate.{check} " in said
    assert "gate.perplexity Perplexity on held-out text" in said and "Options: max_relative_increase" in said
    for key in ("model.source", "scheme.weights.group_size", "train.learn", "gate", "variants", "Exit codes"):
        assert key in shown.output
    wrong = runner.invoke(app, ["plan", "recipe=nowhere.yaml"])
    assert wrong.exit_code == 2 and "nowhere.yaml: no such file" in wrong.output


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["scheme.weights.group_size=48"], r"48 does not divide the 128 inputs of .*: 128, 64, 32, 16, 8\. Set"),
        (["scheme.overrides={'model.layers.2.*': {dtype: int8}}"], r"'model\.layers\.2\.\*' names no linear of this"),
        (["scheme.skip=['*.kv_proj']"], r"scheme\.skip: '\*\.kv_proj' names no linear"),
        (["scheme.skip=['*.q_proj']"], r"leaves model\.layers\.0\.self_attn\.q_proj as they are"),
        (["scheme.overrides={'*.q_proj': {group_size: 64}}"], r"run q_proj, k_proj, v_proj as one"),
        (["variants={a: {}, b: {scheme: {weights: {group_size: 96}}}}"], r"variant b: the group size does not fit"),
    ],
)
def test_what_does_not_fit_the_model_is_said_by_the_plan(model: Path, overrides: list[str], why: str) -> None:
    fits = ["recipe=small.yaml", "export.formats=compressed_tensors"]
    with pytest.raises(RecipeError, match=f"(?s){why}"):
        plan.make(load([*fits, "calibrate.range=activation", *overrides]))
    plan.make(load([*fits, "scheme.skip=[lm_head, '*.down_proj']"]))


def test_a_small_need_is_a_whole_megabyte(model: Path) -> None:
    planned = CliRunner().invoke(app, ["plan", "recipe=small.yaml"]).output
    assert re.search(r"gate +│ \w+ │ run +│ +0\.001 │", planned) and "e-0" not in planned, planned


ENGINES = {  # of TensorRT-LLM: preprocess_weights_for_mixed_gemm; of vLLM: the group sizes of Marlin
    "int4 of trtllm": (["modelopt"], ["trtllm"], 32, INNER, r"group size 32; trtllm's int4 kernels take \(64, 128\)"),
    "int4 of vllm": (["awq"], ["vllm"], 16, INNER, r"group size 16; vllm runs \(32, 64, 128\) or whole rows"),
    "legacy": (["modelopt"], ["trtllm_legacy"], 32, INNER, "group size 32; trtllm's int4 kernels"),
    "all at once": (["awq", "modelopt"], ["vllm", "trtllm"], 16, INNER, "group size 16; vllm.*group size 16; trtllm"),
    "narrow": (["modelopt"], ["trtllm"], 64, 96, r"gate_proj has 96 outputs; trtllm int4 takes multiples of 64"),
}


@pytest.mark.parametrize(("formats", "engines", "group", "inner", "why"), ENGINES.values(), ids=ENGINES.keys())
def test_what_an_engine_does_not_take_is_said_by_the_plan(
    tmp_path: Path, formats: list[str], engines: list[str], group: int, inner: int, why: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    shapes = {name: [inner if n == INNER else n for n in shape] for name, shape in SHAPES.items()}
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    asked = ["recipe=micro.yaml", f"model.source={tmp_path}", f"output={tmp_path / 'runs'}", "gate=null"]
    asked += [f"export.formats={formats}", f"export.engines={engines}", "scheme.skip=[lm_head, '*.down_proj']"]
    small = f"scheme.weights.group_size={group}"
    with pytest.raises(RecipeError, match=f"(?s){why}"):
        plan.make(load([*asked, small]))
    plan.make(load([*asked, small, "until=train"]))  # nothing is exported
    if inner == INNER:
        plan.make(load([*asked, "scheme.weights.group_size=128"]))


def test_a_range_that_does_not_do_experts_is_said_by_the_plan_also_of_a_later_variant(tmp_path: Path) -> None:
    make_model(tmp_path / "mixtral", MixtralConfig, num_local_experts=2, num_experts_per_tok=1, intermediate_size=64)
    asked = ["recipe=micro.yaml", f"model.source={tmp_path / 'mixtral'}", f"output={tmp_path / 'runs'}", "until=train"]
    plan.make(load(asked))
    with pytest.raises(RecipeError, match=r"variant b: calibrate\.range: kl does not do mixtures of experts"):
        plan.make(load([*asked, "variants={a: {}, b: {calibrate: {range: kl}}}"]))


@pytest.mark.parametrize("count", [None, "2", -1, 10**9, 3])
def test_a_number_of_blocks_that_cannot_be_is_an_error_of_the_plan(model: Path, count: object) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": count}))
    with pytest.raises(ValueError, match=r"num_hidden_layers is|lacks model\.layers\.2\.self_attn\.q_proj\.weight"):
        plan.make(load(["recipe=small.yaml"]))


def test_lm_eval_that_is_not_installed_is_said_by_the_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    asked = ["plan", "recipe=micro.yaml", f"output={tmp_path}", "gate.tasks.lm_eval=[arc_easy]"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 2 and ".venv/bin/pip install -e '.[eval]'" in done.output, done.output
    assert CliRunner().invoke(app, [*asked, "until=export"]).exit_code == 0
    assert CliRunner().invoke(app, [*asked[:-1], "gate.tasks.limit=3"]).exit_code == 0, "nothing to be read yet"
