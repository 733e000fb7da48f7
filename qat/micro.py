"""A random Llama of two blocks with a byte tokenizer: for drills and tests, made in a second, never for numbers."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

SEED, HIDDEN, FFN, VOCABULARY = 0, 64, 128, 257


def make_micro(folder: Path) -> Path:
    """The model's folder, made when it is not there; equal bytes each time."""
    if (folder / "config.json").exists():
        return folder
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from qat.artifact import refusals

    part = folder.with_name(f"{folder.name}.part{os.getpid()}")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {letter: number for number, letter in enumerate(["<|endoftext|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(tokens, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(part)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.1,
    )
    with torch.random.fork_rng(devices=[]), refusals(part):
        torch.manual_seed(SEED)
        LlamaForCausalLM(config).bfloat16().save_pretrained(part)
    try:
        os.replace(part, folder)
    except OSError:  # another process was first
        shutil.rmtree(part)
    return folder
