"""The streamed model against Hugging Face's own forward pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config

from qat import model as model_file
from qat.checkpoint import SafetensorsFolder
from qat.model import Model
from tests.artifacts import config_of

IDS = torch.randint(128, (5, 24), generator=torch.Generator().manual_seed(0))
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3-biased": ("qwen3", {"attention_bias": True}),
    "gemma3": ("gemma3_text", {}),
    "gemma3-capped": ("gemma3_text", {"final_logit_softcapping": 5.0, "attention_bias": True}),
    "phi3": ("phi3", {}),
    "phi3-window": ("phi3", {"sliding_window": 7}),
    "phi3-long": ("phi3", {"original_max_position_embeddings": 16, "rope_parameters": {"rope_type": "longrope",
        "rope_theta": 500.0, "short_factor": [1.0, 1.5, 2.0], "long_factor": [3.0, 4.0, 5.0],
        "partial_rotary_factor": 0.4}}),
    "mixtral": ("mixtral", {}),
    "mixtral-window": ("mixtral", {"sliding_window": 7}),
    "qwen3-moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3-moe-dense-first": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "qwen3-moe-every-other": ("qwen3_moe", {"decoder_sparse_step": 2, "attention_bias": True}),
}  # fmt: skip


def save_random(folder: Path, name: str, **changes: Any) -> nn.Module:
    """A random model, biases included, saved in bfloat16; gives Hugging Face's own copy of it in float32."""
    family, more = FAMILIES[name]
    torch.manual_seed(0)
    built = AutoModelForCausalLM.from_config(config_of(family, initializer_range=0.3, **more, **changes))
    for key, value in built.named_parameters():
        if key.endswith("bias"):
            value.data.normal_()
    built.bfloat16().save_pretrained(folder)
    # eager: its loop over experts has the same sums as ours, so equality is to the bit
    how: dict[str, Any] = {"attn_implementation": "sdpa"}
    if hasattr(built.config, "num_local_experts"):
        how["experts_implementation"] = "eager"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how).eval()


def opened(folder: Path, **more: Any) -> Model:
    return Model(AutoConfig.from_pretrained(folder), SafetensorsFolder(folder), **more)


@torch.no_grad()
def logits(model: Model, ids: Tensor = IDS) -> Tensor:
    hidden = torch.cat(list(model.hidden(ids)))
    with model.ends():
        return model.logits(hidden)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_hugging_faces(tmp_path: Path, name: str) -> None:
    theirs = save_random(tmp_path, name)
    for resident in (False, True):
        ours = logits(opened(tmp_path, resident=resident))
        with torch.no_grad():
            assert torch.equal(ours, theirs(IDS).logits), resident


def test_a_sliding_window_is_seen(tmp_path: Path) -> None:
    # else the comparison above would compare two models without one
    save_random(tmp_path, "mistral-window")
    narrow = logits(opened(tmp_path))
    config = AutoConfig.from_pretrained(tmp_path)
    config.sliding_window = None
    wide = logits(Model(config, SafetensorsFolder(tmp_path)))
    assert torch.allclose(narrow[:, :7], wide[:, :7], atol=1e-4)
    assert not torch.allclose(narrow[:, 8:], wide[:, 8:], atol=1e-2)


@pytest.mark.parametrize("windows_in_a_wave", [1, 2, 100])
def test_waves_and_batches_do_not_change_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, windows_in_a_wave: int
) -> None:
    save_random(tmp_path, "llama")
    whole = torch.cat(list(opened(tmp_path).hidden(IDS)))
    monkeypatch.setattr(model_file, "WAVE_BYTES", windows_in_a_wave * IDS.shape[1] * 64 * 4)
    pieces = list(opened(tmp_path).hidden(IDS, batch=2))
    assert [piece.shape for piece in pieces] == [(1, 24, 64)] * len(IDS)
    assert torch.allclose(torch.cat(pieces), whole, rtol=1e-4, atol=1e-5)


def test_lengths_may_change_between_calls(tmp_path: Path) -> None:
    theirs, ours = save_random(tmp_path, "mistral-window"), opened(tmp_path)
    for length in (24, 5, 24, 1):
        ids = IDS[:2, :length]
        with torch.no_grad():
            assert torch.allclose(logits(ours, ids), theirs(ids).logits, rtol=1e-4, atol=1e-4), length


def on_meta(model: Model) -> set[bool]:
    return {p.is_meta for p in model.root.parameters()}


def test_weights_are_there_only_inside_the_context(tmp_path: Path) -> None:
    save_random(tmp_path, "qwen2-tied")
    model = opened(tmp_path)
    assert on_meta(model) == {True}
    with model.block(1) as block:
        assert {p.is_meta for p in block.parameters()} == {False}
        assert {p.is_meta for p in model.blocks[0].parameters()} == {True}
    assert on_meta(model) == {True}
    with model.ends():
        assert {p.is_meta for block in model.blocks for p in block.parameters()} == {True}
        assert not model.root.lm_head.weight.is_meta
        assert model.root.lm_head.weight is model.root.model.embed_tokens.weight
    assert on_meta(model) == {True}
    with pytest.raises(RuntimeError, match="stop"), model.block(0):
        raise RuntimeError("stop")
    assert on_meta(model) == {True}
    list(model.hidden(IDS))
    assert on_meta(model) == {True}


def test_a_resident_model_reads_each_tensor_once(tmp_path: Path) -> None:
    save_random(tmp_path, "llama")
    source, reads = SafetensorsFolder(tmp_path), []

    class Counted:
        names = source.names

        def get(self, name: str) -> Tensor:
            reads.append(name)
            return source.get(name)

    model = Model(AutoConfig.from_pretrained(tmp_path), Counted(), resident=True)
    assert torch.equal(logits(model), logits(model))
    assert sorted(reads) == sorted(source.names())


def test_prepare_sees_each_block_after_its_weights_are_in(tmp_path: Path) -> None:
    save_random(tmp_path, "llama")
    seen = []
    model = opened(tmp_path, prepare=lambda index, block: seen.append((index, next(block.parameters()).is_meta)))
    list(model.hidden(IDS))
    assert seen == [(0, False), (1, False)]


def test_the_callers_config_is_left_alone(tmp_path: Path) -> None:
    save_random(tmp_path, "llama")
    config = AutoConfig.from_pretrained(tmp_path)
    before = config.to_dict()
    Model(config, SafetensorsFolder(tmp_path), dtype=torch.float32)
    assert config.to_dict() == before


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_model_that_stores_a_head_of_its_own(tmp_path: Path, same: bool) -> None:
    theirs = save_random(tmp_path, "llama-tied")
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * (1 if same else 2)
    save_file(tensors, tmp_path / "model.safetensors")
    if same:
        with torch.no_grad():
            assert torch.equal(logits(opened(tmp_path)), theirs(IDS).logits)
        return
    with pytest.raises(ValueError, match=r"tie_word_embeddings is true, yet lm_head\.weight differs"):
        opened(tmp_path)


def test_an_unknown_architecture_is_named_with_the_known_ones(tmp_path: Path) -> None:
    save_random(tmp_path, "llama")
    config = GPT2Config(architectures=["GPT2LMHeadModel"])
    with pytest.raises(
        ValueError, match=r"GPT2LMHeadModel.*known: gemma3_text, llama, mistral, mixtral, phi3.*qat/arch/gpt2\.py"
    ):
        Model(config, SafetensorsFolder(tmp_path))


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"]
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    save_random(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    # "mlp.up_proj.weight" below the block it belongs to
    owner, leaf = name.rsplit(".", 1) if "layers" not in name else ("model.layers.1", "mlp.up_proj.weight")
    with pytest.raises(ValueError, match=rf"weights of {owner} do not fit(.|\n)*{leaf}"):
        logits(opened(tmp_path))


def test_a_tensor_of_another_shape_or_of_no_use_is_named(tmp_path: Path) -> None:
    save_random(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 80}))
    with pytest.raises(ValueError, match=r"model\.layers\.0 do not fit(.|\n)*size mismatch for mlp\.\w+\.weight"):
        logits(opened(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)
    save_file(tensors, tmp_path / "model.safetensors")
    why = r"LlamaDecoderLayer has no place for the tensor model\.layers\.0\.self_attn\.q_norm\.weight"
    with pytest.raises(ValueError, match=why):
        logits(opened(tmp_path))


def test_the_rotary_buffer_of_old_checkpoints_is_ignored(tmp_path: Path) -> None:
    theirs = save_random(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.rand(8)
    save_file(tensors, tmp_path / "model.safetensors")
    with torch.no_grad():
        assert torch.equal(logits(opened(tmp_path)), theirs(IDS).logits)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_bfloat16_computes_in_bfloat16(tmp_path: Path, name: str) -> None:
    save_random(tmp_path, name)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    ours = logits(opened(tmp_path, dtype=torch.bfloat16))
    with torch.no_grad():
        assert ours.dtype == torch.float32 and torch.equal(ours, theirs(IDS).logits.float())
