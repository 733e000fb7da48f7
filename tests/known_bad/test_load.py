"""A parent that is no good: found when it is opened, from its files' headers, before any work."""

from __future__ import annotations

import json
import struct

import pytest
import torch

from qat.job import Job
from tests.known_bad.case import (
    INDEX,
    UP,
    WEIGHTS,
    Case,
    Note,
    Place,
    both,
    check,
    config,
    copy,
    file,
    intact,
    put,
    shard,
    sharded,
    shown,
    tensors,
)
from tests.known_bad.parents import (
    POINTER,
    added_token,
    as_in_the_hub_cache,
    cut,
    forget,
    header,
    keep_only,
    more_block,
    pickled,
    symlink,
    to,
    twice,
    vocabulary,
)

AGAIN = "or not whole: fetch them again"
NORM = "model.norm.weight"


def calibrated(place: Place) -> str:
    assert place.summary["stages"][0]["reused"] is False
    return "calibrated; the token is refused only where a text has it"


def reused(place: Place) -> str:
    """Nothing was made again: the earlier run had the same bytes."""
    assert all(stage["reused"] for stage in place.summary["stages"])
    return "loaded as what it is: every stage reused"


def released(place: Place) -> str:
    said = json.loads((place.stage("export") / "compressed_tensors/config.json").read_text())
    assert said["architectures"] == ["LlamaForCausalLM"]
    return "released; the export's config.json names the class that model_type stands for"


CASES = [
    # files
    Case(
        "no weights",
        "load",
        file(WEIGHTS, None),
        ("model holds no *.safetensors file", "give the folder of a whole model"),
    ),
    Case(
        "weights as a pickle only",
        "load",
        pickled,
        ("holds no *.safetensors file", "pytorch_model.bin is a pickle, which is never loaded", "convert it to"),
    ),
    Case(
        "Git-LFS pointer instead of weights",
        "load",
        file(WEIGHTS, POINTER),
        ("model.safetensors is a Git-LFS pointer", "git lfs pull"),
    ),
    Case(
        "empty weight file",
        "load",
        file(WEIGHTS, ""),
        ("model.safetensors is not valid", "header too small", "fetch it again"),
    ),
    Case("truncated weight file", "load", cut(-1000), ("model.safetensors is not valid", "not fully covered")),
    Case("truncated header", "load", cut(1000), ("model.safetensors is not valid", "header")),
    Case(
        "header whose length is 2^63",
        "load",
        file(WEIGHTS, struct.pack("<Q", 2**63) + b"{}"),
        ("model.safetensors is not valid", "header too large"),
    ),
    Case(
        "header that lies about a shape",
        "load",
        header(lambda said: said[UP].update(shape=[128, 640])),
        ("model.safetensors is not valid", "invalid shape"),
    ),
    Case(
        "header that points behind the file",
        "load",
        header(lambda said: said[UP].update(data_offsets=[0, 10**12])),
        ("model.safetensors is not valid", "invalid offset", UP),
    ),
    Case("one name for two tensors", "load", header(twice), ("model.safetensors is not valid",)),
    Case(
        "missing shard",
        "load",
        both(sharded(), file(shard(2), None)),
        (f"{shard(2)} is missing; the index names it: fetch it again",),
    ),
    Case(
        "shards without an index, one missing",
        "load",
        both(sharded(), file(INDEX, None), file(shard(2), None)),
        ("model lacks", "which LlamaForCausalLM of 2 blocks has", AGAIN),
    ),
    Case(
        "duplicated shard",
        "load",
        both(sharded(), copy(shard(1), "model-00003-of-00003.safetensors"), file(INDEX, None)),
        ("tensor lm_head.weight is in both", shard(1), "keep one"),
    ),
    Case(
        "index that names the wrong shard",
        "load",
        sharded(lambda index: index.update(dict.fromkeys(index, shard(1)))),
        (f"index.json says that {shard(1)} holds", "but it does not", "fetch both again"),
    ),
    Case("index that forgets a tensor", "load", sharded(forget(UP)), (f"model lacks {UP}", AGAIN)),
    Case(
        "index that points outside the folder",
        "load",
        sharded(lambda index: index.update({UP: "../../x.safetensors"})),
        ("index.json points to '../../x.safetensors'", "outside its folder", "beside the index"),
    ),
    Case(
        "index with an absolute path",
        "load",
        sharded(lambda index: index.update({UP: "/etc/passwd"})),
        ("points to '/etc/passwd', outside its folder",),
    ),
    Case("index without a map", "load", both(sharded(), file(INDEX, "{}")), (f"{INDEX} has no weight_map",)),
    Case(
        "index of numbers",
        "load",
        both(sharded(), file(INDEX, '{"weight_map": {"a": 1}}')),
        (f"{INDEX} has no weight_map from tensors to files",),
    ),
    Case("half an index", "load", both(sharded(), file(INDEX, '{"weight_map')), (f"{INDEX} is not JSON",)),
    Case(
        "weights as a link to nowhere", "load", symlink("nowhere"), ("model.safetensors is missing", "fetch it again")
    ),
    Case("weights as a link to itself", "load", symlink(f"model/{WEIGHTS}"), ("model.safetensors is missing",)),
    Case("links as in the hub's cache", "load", as_in_the_hub_cache, code=0, good=reused),
    # tensors against the config
    Case(
        "a linear missing",
        "load",
        tensors(forget(UP)),
        (f"model lacks {UP}, which LlamaForCausalLM of 2 blocks has", AGAIN),
    ),
    Case("no head, and not tied", "load", tensors(forget("lm_head.weight")), ("model lacks lm_head.weight", AGAIN)),
    Case(
        "more blocks in the files than in the config (layers never called)",
        "load",
        tensors(more_block),
        ("model holds model.layers.2.mlp.up_proj.weight, for which LlamaForCausalLM of 2 blocks has no place", AGAIN),
    ),
    Case(
        "more blocks in the config than in the files",
        "load",
        config(num_hidden_layers=3),
        ("model lacks model.layers.2.", "and 8 more", "LlamaForCausalLM of 3 blocks", AGAIN),
    ),
    Case(
        "a module that the architecture does not have",
        "load",
        tensors(lambda found: found.update({"vision.proj.weight": found[UP].clone()})),
        ("model holds vision.proj.weight", "has no place", "or take them out"),
    ),
    Case(
        "sizes of another model in the config",
        "load",
        config(hidden_size=32),
        ("has shape (257, 64), but config.json says (257, 32)", AGAIN),
    ),
    Case(
        "more rows in the config than in the embedding",
        "load",
        config(vocab_size=300),
        ("of model has shape (257, 64), but config.json says (300, 64)",),
    ),
    Case("integer weights", "load", to(torch.int32), (f"{UP} of model is I32", "a full-precision model are")),
    Case("an integer norm", "load", to(torch.int64, NORM), (f"{NORM} of model is I64", "BF16, F16, F32")),
    Case(
        "fp8 weights without a word in the config",
        "load",
        to(torch.float8_e4m3fn),
        (f"{UP} of model is F8_E4M3", "A quantized model is no parent", "take the one that it was made from"),
    ),
    Case(
        "fp8 weights with scales",
        "load",
        tensors(lambda found: found.update({f"{UP}_scale": torch.ones(1)})),
        (f"model holds {UP}_scale", "has no place"),
    ),
    Case(
        "a model that is quantized already",
        "load",
        config(quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}),
        ("model is already quantized (awq)", "Tare starts from full-precision weights"),
    ),
    Case(
        "float64 weights", "load", to(torch.float64), (f"{UP} of model is F64", "weights of a full-precision model are")
    ),
    # config
    Case(
        "no config.json",
        "load",
        file("config.json", None),
        ("model/config.json is missing", "or give the folder that has it"),
    ),
    Case("half a config.json", "load", file("config.json", '{"model_type": '), ("model/config.json is not JSON",)),
    Case(
        "Git-LFS pointer instead of config.json",
        "load",
        file("config.json", POINTER),
        ("model/config.json is not JSON", "is not what its name says"),
    ),
    Case(
        "a list as config.json",
        "load",
        file("config.json", "[]"),
        ("model/config.json holds a JSON list", "where an object is expected"),
    ),
    Case("config without architectures", "load", keep_only("architectures"), code=0, good=released),
    Case(
        "unknown architecture",
        "load",
        config(model_type="frob", architectures=["FrobForCausalLM"]),
        ("architecture FrobForCausalLM (model_type 'frob') is not known", "known: gemma3_text, llama", "one data file"),
    ),
    Case(
        "another known architecture's files",
        "load",
        config(model_type="gpt2"),
        ("model_type 'gpt2') is not known; known: gemma3_text, llama, mistral, mixtral, phi3",),
    ),
    Case(
        "text where a number belongs",
        "load",
        config(hidden_size="64"),
        ("model/config.json: ", "hidden_size", "expected int, got str (value: '64')", "correct the field"),
    ),
    Case(
        "heads that do not divide the width",
        "load",
        config(num_attention_heads=5),
        ("model/config.json: ", "64", "not a multiple of the number of attention heads (5)", "correct the field"),
    ),
    Case(
        "an activation function that nobody knows",
        "load",
        config(hidden_act="magic"),
        ("the config asks for 'magic', which transformers does not have; correct the field",),
    ),
    Case(
        "tied, yet with a head of its own",
        "load",
        config(tie_word_embeddings=True),
        ("tie_word_embeddings is true, yet lm_head.weight differs", "set the flag to false or drop the tensor"),
    ),
    # tokenizer
    Case(
        "no tokenizer",
        "load",
        both(file("tokenizer.json", None), file("tokenizer_config.json", None)),
        ("model has no tokenizer files", "copy the model's tokenizer there"),
    ),
    Case("half a tokenizer.json", "load", file("tokenizer.json", '{"version": '), ("tokenizer.json is not JSON",)),
    Case(
        "Git-LFS pointer instead of the tokenizer",
        "load",
        file("tokenizer.json", POINTER),
        ("model/tokenizer.json is not JSON", "is not what its name says"),
    ),
    Case(
        "an empty object as tokenizer.json",
        "load",
        file("tokenizer.json", "{}"),
        ("the tokenizer files of", "make no tokenizer", "fetch them again"),
    ),
    Case(
        "a tokenizer of more tokens than the model",
        "load",
        config(vocab_size=200),
        ("tokenizer of model has 257 tokens, its config only 200 (vocab_size)", "that belongs to the model"),
    ),
    Case("an added token beyond the embedding, in no text", "data", added_token, code=0, good=calibrated),
    Case(
        "a tokenizer with ids beyond the embedding",
        "data",
        vocabulary(e=5000),
        ("the tokenizer writes 'e' as 5000, but the model has 257 tokens", "take the tokenizer that belongs to"),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fault)
def test_a_parent_that_is_no_good(case: Case, place: Place, capsys: pytest.CaptureFixture[str], note: Note) -> None:
    check(case, place, capsys, note)


def test_weights_that_vanish_during_the_run(
    place: Place, capsys: pytest.CaptureFixture[str], note: Note, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(UP, 0.5)(place)
    before = place.model / WEIGHTS
    monkeypatch.setattr(Job, "_check_texts", lambda job: before.unlink(missing_ok=True))  # after it was opened
    kept = place.files(place.run)
    assert place.start() == 1
    error = capsys.readouterr().err
    assert "model.safetensors is missing" in error and "fetch it again" in error and len(error.splitlines()) == 1
    assert place.summary["status"] == "failed"
    intact(place, kept, failed=True)
    note("a weight file that vanishes during the run", "calibrate", shown(error, place))
