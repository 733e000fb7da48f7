"""The data of every architecture against what Hugging Face saves and computes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, Qwen3MoeConfig

from qat.arch import arch_of, known
from qat.checkpoint import SafetensorsFolder
from qat.experts import Experts
from qat.model import Model, skeleton
from tests.artifacts import config_of
from tests.test_model import FAMILIES, IDS, logits, opened, save_random

MOE = [name for name, (family, _) in FAMILIES.items() if family in ("mixtral", "qwen3_moe")]


class Edited:
    """A `Tensors` source held in memory."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> list[str]:
        return list(self.tensors)

    def get(self, name: str) -> Tensor:
        return self.tensors[name]


def test_every_architecture_is_tried_here() -> None:
    assert {family for family, _ in FAMILIES.values()} == set(known())


@pytest.mark.parametrize("name", FAMILIES)
def test_the_linears_of_a_block_are_its_saved_matrices_but_for_routers(tmp_path: Path, name: str) -> None:
    save_random(tmp_path, name)
    arch, saved = arch_of(AutoConfig.from_pretrained(tmp_path)), load_file(tmp_path / "model.safetensors")
    matrices = {n.removesuffix(".weight") for n, t in saved.items() if t.dim() == 2 and ".layers." in n}
    said = [arch.block_linears(block) + arch.block_routers(block) for block in range(2)]
    assert matrices == {n for names in said for n in names}
    assert len(matrices) == sum(map(len, said))
    for block in range(2):
        here = arch.at(block)
        shared = [n for group in arch.shared(block) for n in group]
        assert sorted(shared) == sorted(arch.block_linears(block))
        assert [arch.split(n) for n in arch.block_linears(block)] == [(block, n) for n in here.linears]
        assert {n for names in arch.fused(block) for n in names} == set(arch.block_linears(block))


@pytest.mark.parametrize("name", FAMILIES)
def test_what_shares_an_input_gets_the_same_tensor(tmp_path: Path, name: str) -> None:
    save_random(tmp_path, name)
    model = opened(tmp_path, resident=True)
    for block in range(2):
        model.load_block(block)
        seen: dict[str, Tensor] = {}
        for leaf in model.arch.at(block).linears:
            linear = model.blocks[block].get_submodule(leaf)
            assert isinstance(linear, nn.Linear)
            linear.register_forward_pre_hook(lambda m, args, leaf=leaf, seen=seen: seen.update({leaf: args[0]}))
        with torch.no_grad():
            model.run_block(block, torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(1)))
        groups = [group for group in model.arch.at(block).shared_input if group[0] in seen]  # all but idle experts
        assert {leaf for group in groups for leaf in group} == set(seen) and len(groups) >= 4
        for group in groups:
            assert len({id(seen[leaf]) for leaf in group}) == 1, group
        assert len({id(x) for x in seen.values()}) == len(groups)


def fold(tensors: dict[str, Tensor], config: Any, block: int, random: torch.Generator) -> None:
    """Divide the output of each norm (or earlier linear) by powers of two, and multiply the consumers' columns."""
    arch = arch_of(config).at(block)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    for source, consumers in arch.norm_pairs:
        weight = tensors[f"{arch.blocks}.{block}.{source}.weight"]
        factor = torch.exp2(torch.randint(-2, 3, (len(weight),), generator=random))
        if source in arch.linears:
            tensors[f"{arch.blocks}.{block}.{source}.weight"] = weight / factor[:, None]
            bias = f"{arch.blocks}.{block}.{source}.bias"
            if bias in tensors:
                tensors[bias] = tensors[bias] / factor
        else:
            tensors[f"{arch.blocks}.{block}.{source}.weight"] = (weight + arch.norm_offset) / factor - arch.norm_offset
        for consumer in consumers:
            full, columns = f"{arch.blocks}.{block}.{consumer}.weight", factor
            if source.endswith("v_proj"):  # the query heads of a group read the same value head
                columns = factor.view(kv_heads, 1, -1).expand(-1, heads // kv_heads, -1).flatten()
            tensors[full] = tensors[full] * columns


@pytest.mark.parametrize("name", FAMILIES)
def test_a_factor_folded_into_any_pair_changes_nothing(tmp_path: Path, name: str) -> None:
    save_random(tmp_path, name)
    source = SafetensorsFolder(tmp_path)
    config, tensors = AutoConfig.from_pretrained(tmp_path), {n: source.get(n).float() for n in source.names()}
    before, random = logits(Model(config, Edited(tensors))), torch.Generator().manual_seed(4)
    for block in range(2):
        fold(tensors, config, block, random)
    changed = [n for n, value in tensors.items() if not torch.equal(value, source.get(n).float())]
    assert len(changed) >= 2 * 4
    after = logits(Model(config, Edited(tensors)))
    if arch_of(config).norm_offset:  # (1 + w) / s - 1 is rounded
        assert torch.allclose(before, after, rtol=1e-3, atol=1e-3)
    else:
        assert torch.equal(before, after)


def test_numbers_of_experts_and_dense_blocks_come_from_the_config() -> None:
    config = Qwen3MoeConfig(num_experts=3, num_hidden_layers=5, decoder_sparse_step=2, mlp_only_layers=[3])
    arch = arch_of(config)
    assert arch.dense_blocks == {0, 2, 3, 4}
    assert [len(arch.block_linears(block)) for block in range(5)] == [7, 13, 7, 7, 7]
    assert arch.block_linears(1)[4:8] == [f"model.layers.1.mlp.experts.{leaf}" for leaf in
        ("0.gate_proj", "0.up_proj", "0.down_proj", "1.gate_proj")]  # fmt: skip
    assert arch.block_routers(1) == ["model.layers.1.mlp.gate"] and arch.block_routers(0) == []
    pairs = dict(arch.at(1).norm_pairs)
    assert pairs["post_attention_layernorm"][:3] == ("mlp.gate", "mlp.experts.0.gate_proj", "mlp.experts.0.up_proj")
    assert pairs["mlp.experts.2.up_proj"] == ("mlp.experts.2.down_proj",)
    assert arch_of(Qwen3MoeConfig(num_experts=3, num_hidden_layers=5)).dense_blocks == frozenset()
    all_dense = arch_of(Qwen3MoeConfig(num_experts=3, num_hidden_layers=2, mlp_only_layers=[0, 1]))
    assert len(all_dense.linears) == 7 and all_dense.routers == () and all_dense.experts is None


@pytest.mark.parametrize("name", MOE)
def test_an_expert_without_tokens_does_not_run(tmp_path: Path, name: str) -> None:
    field = "num_local_experts" if FAMILIES[name][0] == "mixtral" else "num_experts"
    theirs = save_random(tmp_path, name, **{field: 5})
    source = SafetensorsFolder(tmp_path)
    tensors = {n: source.get(n).float() for n in source.names()}
    # logits 2 t, t, -t, -2 t, 0 of one number t: two of the first four are ahead of the last, whatever its sign
    rows = torch.tensor([2.0, 1.0, -1.0, -2.0, 0.0])[:, None] * torch.randn(
        64, generator=torch.Generator().manual_seed(6)
    )
    for router in [n for n in tensors if n.endswith((".mlp.gate.weight", "moe.gate.weight"))]:
        tensors[router] = rows
    for full, parameter in theirs.named_parameters():
        if full.endswith(".mlp.gate.weight"):
            parameter.data.copy_(rows)
    model = Model(AutoConfig.from_pretrained(tmp_path), Edited(tensors), resident=True)
    tokens: dict[str, int] = {}

    def watch(full: str) -> None:
        model.root.get_submodule(full).register_forward_pre_hook(
            lambda m, args: tokens.update({full: tokens.get(full, 0) + args[0].shape[0]})
        )

    linears = [n for block in range(2) for n in model.arch.block_linears(block) if ".experts." in n]
    for block in range(2):
        model.load_block(block)
    for full in linears:
        watch(full)
    ours = logits(model)
    assert {n for n in linears if n not in tokens} == {n for n in linears if ".experts.4." in n} != set()
    assert sum(tokens.values()) == 3 * 2 * IDS.numel() * len({n.split(".")[2] for n in linears})
    with torch.no_grad():
        assert torch.equal(ours, theirs(IDS).logits)


@pytest.mark.parametrize("name", MOE)
def test_transformers_own_choice_of_kernels_agrees(tmp_path: Path, name: str) -> None:
    theirs = save_random(tmp_path, name)
    theirs.set_experts_implementation("grouped_mm")
    with torch.no_grad():
        assert torch.allclose(logits(opened(tmp_path)), theirs(IDS).logits, rtol=1e-4, atol=1e-4)


def test_gradients_pass_through_the_experts(tmp_path: Path) -> None:
    theirs = save_random(tmp_path, "mixtral").requires_grad_(False)
    model = opened(tmp_path, resident=True)
    experts = model.load_block(0).get_submodule("block_sparse_moe.experts")
    assert isinstance(experts, Experts)
    random = torch.Generator().manual_seed(5)
    hidden, shares = torch.randn(7, 64, generator=random), torch.rand(7, 2, generator=random)
    chosen = torch.randint(0, 4, (7, 1), generator=random)
    chosen = torch.cat([chosen, (chosen + 1) % 4], 1)
    grads = []
    for module in (experts, theirs.model.layers[0].mlp.experts):
        x = hidden.clone().requires_grad_()
        module(x, chosen, shares).square().sum().backward()
        grads.append(x.grad)
    assert torch.allclose(*grads, rtol=1e-4, atol=1e-5)


def test_stacked_experts_say_how_to_store_them(tmp_path: Path) -> None:
    theirs = save_random(tmp_path / "hub", "mixtral")
    theirs.save_pretrained(tmp_path / "stacked", save_original_format=False)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts\.\w+ .*save_original_format=True"):
        opened(tmp_path / "stacked")


def test_the_skeleton_takes_no_memory_and_leaves_transformers_alone() -> None:
    config = config_of("mixtral")
    root = skeleton(copy.deepcopy(config))
    assert {p.device.type for p in root.parameters()} == {"meta"}
    block = root.model.layers[0]
    assert block.mlp is block.block_sparse_moe and "mlp" not in dict(block.named_children())
    assert not hasattr(skeleton(config_of("llama")).model.layers[0].mlp, "experts")
