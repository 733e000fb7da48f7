"""Where a parent comes from. What is no good about one: tests/known_bad/test_load.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils.logging import enable_progress_bar

from qat.checkpoint import SafetensorsFolder
from qat.index import model_files
from qat.micro import make_micro
from qat.parent import Parent, open_parent
from qat.plugins import ROOT
from tests.artifacts import config_of, save_tokenizer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKEN = "hf_secretsecretsecret1234"


def save_parent(folder: Path, **changes: Any) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config_of("llama", **changes)).bfloat16().save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def opened(source: Path | str, cache: Path) -> Parent:
    return open_parent(str(source), None, False, cache)


def test_no_bar_of_a_library_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    enable_progress_bar()
    AutoModelForCausalLM.from_config(config_of("llama")).save_pretrained(tmp_path / "shown")
    assert "it/s" in capfd.readouterr().err, "this is what would be seen"
    opened("micro", tmp_path)
    assert capfd.readouterr() == ("", "")


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_local_folder_gives_the_tensors_that_were_saved(tmp_path: Path) -> None:
    folder = save_parent(tmp_path / "good")
    (folder / "LICENSE").write_text("be kind")
    parent = opened(folder, tmp_path / "cache")
    theirs = load_file(folder / WEIGHTS)
    assert set(parent.tensors.names()) == set(theirs)
    assert all(torch.equal(parent.tensors.get(name), value) for name, value in theirs.items())
    assert (parent.name, parent.arch.class_name, len(parent.tokenizer)) == ("good", "LlamaForCausalLM", 8)
    assert {WEIGHTS, "config.json", "tokenizer.json", "LICENSE"} <= {path.name for path in model_files(folder)}
    assert not (tmp_path / "cache").exists()


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    whole = save_parent(tmp_path / "whole")
    model = AutoModelForCausalLM.from_pretrained(whole)
    shards = save_parent(tmp_path / "shards")
    (shards / WEIGHTS).unlink()
    model.save_pretrained(shards, max_shard_size="50KB")
    save_file({"model.norm.weight": torch.zeros(64)}, shards / "optimizer.safetensors")  # not in the index: not ours
    a, b = opened(whole, tmp_path).tensors, opened(shards, tmp_path).tensors
    assert len(b.files()) > 2 and sorted(a.names()) == sorted(b.names())
    assert all(torch.equal(a.get(name), b.get(name)) for name in a.names())


def test_a_tensor_is_a_copy(tmp_path: Path) -> None:
    tensors = SafetensorsFolder(save_parent(tmp_path / "good"))
    tensors.get("model.norm.weight").fill_(9)
    assert not (tensors.get("model.norm.weight") == 9).any()
    with pytest.raises(KeyError):
        tensors.get("model.nothing")


def test_micro_has_the_same_bytes_every_time_and_leaves_the_seed_alone(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    one = make_micro(tmp_path / "one")
    torch.manual_seed(123)
    two = make_micro(tmp_path / "two")
    torch.random.set_rng_state(state)
    assert bytes_of(one) == bytes_of(two) and len(bytes_of(one)) >= 4
    before = (one / WEIGHTS).stat().st_mtime_ns
    assert make_micro(one) == one and (one / WEIGHTS).stat().st_mtime_ns == before
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two"}
    parent = opened("micro", tmp_path / "cache")
    text = "Caf\u00e9 \u6f22\u5b57 \U0001f600\n"
    assert parent.tokenizer.decode(parent.tokenizer(text)["input_ids"]) == text


def test_another_process_may_be_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, replace, pid = tmp_path / "micro", os.replace, os.getpid()

    def late(source: Path, target: Path) -> None:
        if Path(source).suffix == f".part{pid}":  # ours; the other one begins and ends just before
            with monkeypatch.context() as patch:
                patch.setattr(os, "getpid", lambda: pid + 1)
                make_micro(folder)
        replace(source, target)

    monkeypatch.setattr(os, "replace", late)
    assert make_micro(folder) == folder
    assert [path.name for path in tmp_path.iterdir()] == ["micro"]
    monkeypatch.undo()
    assert bytes_of(folder) == bytes_of(make_micro(tmp_path / "again"))


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def write_gguf(path: Path, folder: Path) -> None:
    """A Llama folder as llama.cpp's converter writes it: rows of q and k in its rotary order, values in float32."""
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    letters = [f"<0x{n:02X}>" for n in range(125)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *letters])
    writer.add_token_scores([0.0] * 128)
    writer.add_token_types([2, 3, 3] + [6] * 125)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    ends = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, value in load_file(folder / WEIGHTS).items():
        stem, array = name.removesuffix(".weight"), value.float()
        if stem.startswith("model.layers."):
            index, _, leaf = stem.removeprefix("model.layers.").partition(".")
            if leaf in ("self_attn.q_proj", "self_attn.k_proj"):
                count = heads if "q_proj" in leaf else kv_heads
                array = array.view(count, 2, -1, array.shape[1]).transpose(1, 2).reshape(array.shape)
            target = f"blk.{index}.{GGUF_NAMES[leaf]}.weight"
        else:
            target = f"{ends[stem]}.weight"
        writer.add_tensor(target, np.ascontiguousarray(array.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_gives_back_the_model_it_was_made_of(tmp_path: Path) -> None:
    folder, file = save_parent(tmp_path / "good"), tmp_path / "tiny.gguf"
    write_gguf(file, folder)
    (tmp_path / "LICENSE").write_text("be kind")
    cache = tmp_path / "cache"
    parent = opened(file, cache)
    assert parent.name == "tiny" and parent.arch.class_name == "LlamaForCausalLM"
    theirs = load_file(folder / WEIGHTS)
    assert set(parent.tensors.names()) == set(theirs)
    for name, value in theirs.items():
        assert torch.equal(parent.tensors.get(name), value), name
    assert (parent.folder / "LICENSE").read_text() == "be kind"
    made = bytes_of(cache)
    assert opened(file, cache).folder == parent.folder and bytes_of(cache) == made
    (tmp_path / "other.gguf").write_bytes(file.read_bytes())  # known by content, not by name
    assert opened(tmp_path / "other.gguf", cache).folder == parent.folder


@pytest.mark.parametrize("source", ["/nowhere/at/all", "./missing", "~/missing", "missing.gguf"])
def test_a_path_that_is_not_there(tmp_path: Path, source: str) -> None:
    with pytest.raises(ValueError, match=rf"model\.source .*{source.strip('.~')}.*(is not a folder|does not exist)"):
        opened(source, tmp_path)


OFFLINE = """
import sys
from qat.train import main
sys.exit(main(["recipe=micro.yaml", "model.source=nobody/nothing-of-that-name", "output=" + sys.argv[1]]))
"""


def test_offline_a_hub_id_fails_in_one_line_without_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HF_HUB_OFFLINE": "1", "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home")}.items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-c", OFFLINE, str(tmp_path / "runs")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    said = [line for line in done.stderr.splitlines() if "nobody/nothing-of-that-name" in line]
    assert len(said) == 1 and "HF_HUB_OFFLINE is set: only the local cache was searched" in said[0]
    assert "Traceback" not in done.stderr
    summary = json.loads((tmp_path / "runs" / "micro" / "summary.json").read_text())
    assert summary["status"] == "failed" and "HF_HUB_OFFLINE" in summary["error"]
    assert TOKEN not in done.stdout + done.stderr
    assert all(TOKEN.encode() not in content for content in bytes_of(tmp_path / "runs").values())
