"""transformers 5 on CPU or GPU: dense directories by itself, compressed-tensors ones with that package installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qat.arch import Arch
from qat.coverage import Layer

VERSION = 1
ALSO_CALLED = ("hf", "huggingface")
LOADS = {
    "dense": {"int4", "int4-asym", "int8", "w8a8", "fp8-channel", "fp8-tensor", "fp8-block"},
    # asymmetric: transformers 5.24 refuses to load the packed zero points that the library's own compressor writes
    "compressed_tensors": {"int4", "int8", "w8a8", "fp8-channel", "fp8-tensor", "fp8-block"},
}
# compressed-tensors 0.20 hands attention its rounding cache under a name that transformers 5.24 ignores
KV_CACHE: set[str] = set()


def check(format_name: str, found: Sequence[Layer], arch: Arch) -> None:
    """Nothing to refuse: transformers unpacks the weights and runs ordinary linears."""


def launch(directory_name: str, config: dict[str, Any]) -> dict[str, str]:
    """Files by path that run the model. directory_name: of the checkpoint. config: of the exported directory."""
    script = f'''"""Continue a text with {directory_name}: python serve/generate.py "Once upon a time"."""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

folder = Path(__file__).resolve().parent.parent
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
inputs = tokenizer(sys.argv[1], return_tensors="pt", return_token_type_ids=False)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0], skip_special_tokens=True))
'''
    return {"serve/generate.py": script}
