"""A model larger than the memory it is given."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from qat.plugins import ROOT

BLOCKS = 16
CONFIG = LlamaConfig(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=BLOCKS,
    num_attention_heads=32,
    num_key_value_heads=4,
    tie_word_embeddings=True,
    dtype="float32",
)
WORK = """
import json, resource, sys
from pathlib import Path
import torch
from transformers import AutoConfig
from calibrate import observe
from qat.checkpoint import SafetensorsFolder
from qat.scheme import Scheme, TensorFormat
from qat.sections import Calibrate

parent, out = map(Path, sys.argv[1:])
methods = Calibrate(range={"name": "activation", "ratios": 2})
chosen = {q: getattr(methods, q) for q in observe.QUESTIONS}
scheme = Scheme(weights=TensorFormat(group_size=128))
windows = torch.arange(64).view(2, 32)
config = AutoConfig.from_pretrained(parent)
metrics = observe.run(config, SafetensorsFolder(parent), scheme, windows, chosen, parent, out)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(json.dumps({"peak_rss_gib": peak, "linears": metrics["linears"]}))
"""


def write_random_model(folder: Path) -> int:
    """Shards of one block each, all with the same random values; returns bytes on disk."""
    folder.mkdir()
    kv = CONFIG.num_key_value_heads * CONFIG.hidden_size // CONFIG.num_attention_heads
    hidden, inner = CONFIG.hidden_size, CONFIG.intermediate_size
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    generator = torch.Generator().manual_seed(0)
    block = {f"{name}.weight": torch.randn(shape, generator=generator) * 0.02 for name, shape in shapes.items()}
    block |= {f"{name}.weight": torch.ones(hidden) for name in ("input_layernorm", "post_attention_layernorm")}
    rest = {"model.embed_tokens.weight": torch.randn(CONFIG.vocab_size, hidden, generator=generator)}
    shards = {"rest.safetensors": rest | {"model.norm.weight": torch.ones(hidden)}}
    for index in range(BLOCKS):
        shards[f"{index}.safetensors"] = {f"model.layers.{index}.{name}": value for name, value in block.items()}
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    CONFIG.save_pretrained(folder)
    index = {"weight_map": {name: file for file, tensors in shards.items() for name in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.slow
def test_three_gigabytes_are_quantized_in_less_than_half_of_that(tmp_path: Path) -> None:
    assert write_random_model(tmp_path / "parent") > 3e9
    command = [sys.executable, "-c", WORK, str(tmp_path / "parent"), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["linears"] == 7 * BLOCKS
    assert said["peak_rss_gib"] < 1.5, said
    for path in tmp_path.rglob("*.safetensors"):
        path.unlink()  # pytest keeps the folders of the last runs
