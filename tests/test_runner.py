"""The runner's ways through a model: quantized prefix, waiting or starting anew, spilled states, several ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig

from calibrate import streams, table
from calibrate.activations import Activations
from calibrate.inputs import InputStats
from calibrate.range import activation
from calibrate.round import nearest
from calibrate.staged import Passage
from qat.artifact import Artifact
from qat.checkpoint import SafetensorsFolder
from qat.plugins import ROOT
from qat.quant import Quantized, dequantize, to_grid
from qat.scheme import KV_CACHE
from tests.test_observe import INT4, STATIC, WINDOWS, make, run, weights_bytes


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("llama"), attention_bias=True)


@pytest.fixture
def prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding to nearest that looks at the inputs which the quantized prefix gives."""
    monkeypatch.setattr(nearest, "PREFIX", True, raising=False)


def inputs_in_order(folder: Path, artifact: Artifact) -> dict[str, Tensor]:
    """Inputs of every linear in Hugging Face's own forward pass of the parent, with all earlier groups quantized."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    seen: dict[str, Tensor] = {}
    names = list(artifact.formats)
    for name in names:
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, args, name=name: seen.__setitem__(name, args[0].detach().clone())
        )
    found: dict[str, Tensor] = {}
    groups = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
    for index in range(model.config.num_hidden_layers):
        for leaves in groups:
            with torch.no_grad():
                model(WINDOWS)
            for name in [n for n in names if n.startswith(f"model.layers.{index}.") and n.rpartition(".")[2] in leaves]:
                found[name] = seen[name]
                linear = model.get_submodule(name)
                linear.weight.data = dequantize(artifact.quantized(name), artifact.formats[name])
                if linear.bias is not None:
                    linear.bias.data = to_grid(linear.bias.data)
    return found


def test_statistics_are_those_of_the_quantized_prefix(llama: Path, tmp_path: Path, prefix: None) -> None:
    run(llama, tmp_path / "out", range="activation")
    run(llama, tmp_path / "parent", range="max")
    artifact = Artifact(tmp_path / "out")
    expected = inputs_in_order(llama, artifact)
    parent = AutoModelForCausalLM.from_pretrained(llama)
    for name, x in expected.items():
        stats = InputStats({"second_moment"}, x.shape[-1])
        stats.update(x)
        weight = parent.get_submodule(name).weight.detach()
        scale, _ = activation.find(weight, artifact.formats[name], stats, activation.Options())
        same = (scale == artifact.quantized(name).scale).float().mean()
        assert same > 0.98, name  # two candidates may tie to within the last bits of a sum
    moved = Artifact(tmp_path / "parent").quantized("model.layers.2.mlp.down_proj").scale
    assert not torch.equal(moved, artifact.quantized("model.layers.2.mlp.down_proj").scale)


def test_starting_anew_gives_the_bits_of_waiting(
    llama: Path, tmp_path: Path, prefix: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[bool] = []
    through = Passage.run
    monkeypatch.setattr(Passage, "run", lambda self, hold: (used.append(hold), through(self, hold)))
    run(llama, tmp_path / "held")
    monkeypatch.setattr(streams, "DEVICE_BYTES", 0)
    run(llama, tmp_path / "anew")
    assert used == [True] * 3 + [False] * 3
    assert weights_bytes(tmp_path / "held") == weights_bytes(tmp_path / "anew")


@pytest.mark.parametrize("whole", [True, False])
def test_states_on_disk_give_the_same_bytes_and_leave_nothing(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    if whole:
        monkeypatch.setattr(nearest, "PREFIX", True, raising=False)
    run(llama, tmp_path / "memory")
    run(llama, tmp_path / "mixed", activation_bytes=2 * 24 * 32 * 4 + 1)
    run(llama, tmp_path / "disk", activation_bytes=0)
    assert weights_bytes(tmp_path / "memory") == weights_bytes(tmp_path / "disk") == weights_bytes(tmp_path / "mixed")


def test_activations_lie_where_there_is_room(tmp_path: Path) -> None:
    values = [torch.randn(2, 3, 4).bfloat16() for _ in range(3)] + [torch.randn(1, 3, 4).bfloat16()]
    size = 2 * 3 * 4 * 2
    states = Activations([2, 2, 2, 1], 3, 4, torch.bfloat16, torch.device("cpu"), 2 * size + size // 2, tmp_path)
    for index, value in enumerate(values):
        states[index] = value
    assert states.disk_bytes == size == sum(file.stat().st_size for file in tmp_path.iterdir())
    assert all(torch.equal(a, b) for a, b in zip(states, values, strict=True))
    states[2] = values[0]
    assert torch.equal(states[2], values[0])
    states.close()
    assert not list(tmp_path.iterdir())


def test_a_resumed_prefix_run_gives_the_same_bytes(llama: Path, tmp_path: Path, prefix: None) -> None:
    run(llama, tmp_path / "whole")

    def stop(done: int, total: int, error: float) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(llama, tmp_path / "out", progress=stop)
    assert run(llama, tmp_path / "out")["blocks_reused"] == 2
    assert weights_bytes(tmp_path / "out") == weights_bytes(tmp_path / "whole")


def whole_block(task: Any, options: Any) -> dict[str, Quantized]:
    """A rounding of a whole block that checks what it is given against the block itself."""
    for linear in task.linears.values():
        assert linear.weight.shape == task.weights[next(n for n, m in task.linears.items() if m is linear)].shape
    with torch.no_grad():
        out = task.forward(task.inputs[0])
    assert out.shape == task.targets[0].shape and not torch.equal(out, task.inputs[0])
    SEEN.append((out - task.targets[0]).abs().mean().item())
    return {
        name: nearest.codes(task.weights[name], *task.ranges[name], task.formats[name], None, options)
        for name in task.linears
    }


SEEN: list[float] = []


def test_a_rounding_of_whole_blocks_sees_both_streams(
    llama: Path, tmp_path: Path, prefix: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(llama, tmp_path / "in_order", range="max")
    SEEN.clear()
    monkeypatch.setattr(nearest, "block", whole_block, raising=False)
    run(llama, tmp_path / "whole", range="max")
    assert SEEN[0] == 0 < SEEN[1] < SEEN[2]  # the first block's inputs are the parent's; then rounding errors add up
    assert weights_bytes(tmp_path / "in_order").keys() == weights_bytes(tmp_path / "whole").keys()
    for name in Artifact(tmp_path / "whole").names():
        assert torch.equal(Artifact(tmp_path / "whole").get(name), Artifact(tmp_path / "in_order").get(name)), name


RANKS = """
import sys, torch
from pathlib import Path
from accelerate import PartialState
sys.path[:0] = [{root!r}]
from qat.ranks import leave
from tests.test_observe import INT4, WINDOWS, run
PartialState(cpu=True)
run(Path(sys.argv[1]), Path(sys.argv[2]), INT4, WINDOWS, range=sys.argv[3])
leave()
"""


@pytest.mark.slow
@pytest.mark.parametrize("range_", ["activation", "kl"])
def test_two_ranks_find_what_one_finds(llama: Path, tmp_path: Path, range_: str) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(root=str(ROOT)))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    done = subprocess.run(
        [*launch, str(llama), str(tmp_path / "two"), range_], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    run(llama, tmp_path / "one", range=range_)
    one, two = Artifact(tmp_path / "one"), Artifact(tmp_path / "two")
    assert one.stored() == two.stored() and sorted(weights_bytes(tmp_path / "two")) == sorted(
        weights_bytes(tmp_path / "one")
    )
    for name in one.formats:
        a, b = one.quantized(name), two.quantized(name)
        assert (a.scale == b.scale).float().mean() > 0.98, name  # sums over tokens in another order
        assert (a.scale / b.scale).log2().abs().max() <= 1


def test_a_linear_that_saw_few_tokens_is_rounded_without_statistics(llama: Path, tmp_path: Path) -> None:
    """A stand-in for experts that are seldom chosen: one hook is told of three tokens only."""
    update = InputStats.update

    def starved(self: InputStats, x: Tensor, weight: Tensor | None = None) -> None:
        update(self, x.flatten(0, -2)[:1] if x.shape[-1] == 48 else x, weight)

    InputStats.update = starved  # type: ignore[method-assign]
    try:
        metrics = run(llama, tmp_path / "out", INT4)
    finally:
        InputStats.update = update  # type: ignore[method-assign]
    assert metrics["without_statistics"] == [f"model.layers.{i}.mlp.down_proj" for i in range(3)]
    run(llama, tmp_path / "max", INT4, range="max")
    ours, plain = Artifact(tmp_path / "out"), Artifact(tmp_path / "max")
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(ours.get(name), plain.get(name))
    table = (tmp_path / "out" / "layers.csv").read_text()
    assert table.count('"max, nearest: 3 tokens seen"') == 3


@pytest.mark.parametrize("whole", [True, False])
def test_experts_are_quantized_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """Also experts that the text never chose: nothing of them is uninitialised, the table says what was done."""
    if whole:
        monkeypatch.setattr(nearest, "PREFIX", True, raising=False)
    parent = make(
        tmp_path / "moe",
        MixtralConfig,
        num_local_experts=5,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
        intermediate_size=32,
    )
    metrics = run(parent, tmp_path / "out", range="activation")
    artifact, tensors = Artifact(tmp_path / "out"), SafetensorsFolder(parent)
    assert set(artifact.names()) == set(tensors.names())
    assert len(artifact.formats) == 3 * (4 + 5 * 3)
    rare = metrics["without_statistics"]
    assert 0 < len(rare) < 3 * 5 * 3
    rows = {row["layer"]: row for row in table.read(tmp_path / "out" / table.TABLE)}
    run(parent, tmp_path / "max", INT4, range="max")
    plain = Artifact(tmp_path / "max")
    for name in rare:
        assert int(rows[name]["treatment"].split()[2]) < 64
        assert torch.equal(artifact.get(f"{name}.weight"), plain.get(f"{name}.weight"))
    assert all(not row["treatment"] for name, row in rows.items() if name not in rare)
    router = "model.layers.0.block_sparse_moe.gate.weight"
    assert torch.equal(artifact.get(router), tensors.get(router))


def test_experts_share_one_static_input_scale(tmp_path: Path) -> None:
    parent = make(tmp_path / "moe", MixtralConfig, num_local_experts=4, tie_word_embeddings=False)
    run(parent, tmp_path / "out", STATIC, range="max")
    artifact = Artifact(tmp_path / "out")
    for leaves in (("w1", "w3"), ("w2",)):
        names = [f"model.layers.1.block_sparse_moe.experts.{e}.{leaf}" for e in range(4) for leaf in leaves]
        assert len({artifact.raw(f"{name}.input_scale").item() for name in names}) == 1


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("method", ["max", "percentile"])
def test_static_scales_come_from_the_chosen_range(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, whole: bool
) -> None:
    """Input scales, and those of keys and values, against what Hugging Face's own forward pass gives its cache."""
    if whole:
        monkeypatch.setattr(nearest, "PREFIX", True, raising=False)
    scheme = STATIC.model_copy(update={"kv_cache": KV_CACHE})
    run(
        llama,
        tmp_path / "out",
        scheme,
        range="max",
        inputs={"name": method} | ({"percentile": 90} if method != "max" else {}),
    )
    artifact = Artifact(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(llama)
    seen: dict[str, Tensor] = {}
    name = "model.layers.0.self_attn.q_proj"
    model.get_submodule(name).register_forward_pre_hook(lambda m, args: seen.__setitem__("x", args[0]))
    if whole:  # what the cache holds comes from quantized projections
        for leaf in ("q_proj", "k_proj", "v_proj"):
            linear = model.get_submodule(f"model.layers.0.self_attn.{leaf}")
            linear.weight.data = artifact.get(f"model.layers.0.self_attn.{leaf}.weight")
            linear.bias.data = artifact.get(f"model.layers.0.self_attn.{leaf}.bias")
    with torch.no_grad():
        cache = model(WINDOWS, use_cache=True).past_key_values
    keys, values = cache.layers[0].keys, cache.layers[0].values
    found = (artifact.raw(f"{name}.input_scale"), *(artifact.cache_scales("model.layers.0.self_attn") or ()))
    for scale, x in zip(found, (seen["x"], keys, values), strict=True):
        clip = x.abs().max() if method == "max" else x.abs().flatten().quantile(0.9)
        torch.testing.assert_close(scale.item() * 448, clip.item(), rtol=1e-2, atol=0)


@pytest.mark.parametrize("rounding", [{"name": "gptq"}, {"name": "learned", "steps": 2}, {"name": "nearest"}])
def test_a_block_that_the_scheme_skips_is_passed_by(llama: Path, tmp_path: Path, rounding: dict[str, Any]) -> None:
    scheme = INT4.model_copy(update={"skip": ("lm_head", "model.layers.1.*")})
    run(llama, tmp_path / "out", scheme, round=rounding)
    artifact, parent = Artifact(tmp_path / "out"), SafetensorsFolder(llama)
    for name in parent.names():
        if name.startswith("model.layers.1."):
            assert torch.equal(artifact.get(name), parent.get(name)), name
    assert len(artifact.formats) == 14


def test_experts_never_start_a_block_anew_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[bool] = []
    through = Passage.run
    monkeypatch.setattr(Passage, "run", lambda self, hold: (used.append(hold), through(self, hold)))
    monkeypatch.setattr(streams, "DEVICE_BYTES", 0)
    parent = make(tmp_path / "moe", MixtralConfig, num_local_experts=3, tie_word_embeddings=False)
    run(parent, tmp_path / "out", round="gptq")
    assert used == [True] * 3
