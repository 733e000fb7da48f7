"""What benchmarks/calibration.py gives to every tool, and how it judges what comes back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import gate.stage
from qat.parent import Parent, open_parent
from qat.plugins import ROOT
from qat.sections import Text
from qat.tokens import windows

TOKENS = "tokens.safetensors"
LLAMA_3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def prepare(options: dict[str, str], work: Path) -> tuple[Path, str]:
    """Write the calibration windows into `work`; the model's folder, shortened to `blocks`, and what to call it."""
    count, length = int(options["windows"]), int(options["length"])
    if options["model"].startswith("random:"):
        folder = random_llama(int(options["model"].partition(":")[2]), work / "random", options["device"])
        tokens = torch.randint(LLAMA_3_8B["vocab_size"], (count, length), generator=torch.Generator().manual_seed(0))
        name = f"Llama-3-8B-shaped, {options['model'].partition(':')[2]} layers"
    else:
        parent = open_parent(options["model"], None, False, work / "parent")
        tokens = windows(parent.tokenizer, Text(source=options["calibration"]), length, count).windows
        folder, name = parent.folder, Path(options["model"]).stem
    save_file({"windows": tokens}, work / TOKENS)
    return (shortened(folder, int(options["blocks"]), work / "short") if options["blocks"] else folder), name


def shortened(folder: Path, blocks: int, out: Path) -> Path:
    """The same checkpoint with its first `blocks` decoder blocks only: links, and another config."""
    out.mkdir()
    for file in folder.resolve().iterdir():
        if file.name != "config.json":
            (out / file.name).symlink_to(file)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = blocks
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:blocks]
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return out


def random_llama(layers: int, out: Path, device: str) -> Path:
    """A Llama-3-8B of `layers` layers, bfloat16, weights drawn with standard deviation 0.02."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, dtype="bfloat16", **LLAMA_3_8B)).bfloat16()
    model.save_pretrained(out)
    for file in (ROOT / "recipes/demo/model").glob("*token*"):  # llm-compressor asks for one, and leaves it unused
        shutil.copy(file, out)
    del model
    if device != "cpu":
        torch.cuda.empty_cache()
    return out


def measure(options: dict[str, str], model: Path, rows: list[dict[str, Any]], work: Path) -> None:
    """Add ppl and kl to the rows, and that of the parent: the gate's readers and its arithmetic for all of them."""
    held = evaluation(options, model)
    states = [gate.stage.plain_state(row["tool"], Path(row["target"]) / "compressed_tensors") for row in rows]
    cache = work / "measured"
    cache.mkdir()
    dtype = getattr(torch, options["dtype"])
    found = gate.stage.measure_all(
        gate.stage.plain_state("parent", model), states, held, cache, options["device"], dtype
    )["states"]
    for row in rows:
        row["ppl"], row["kl"] = found[row["tool"]]["perplexity"], found[row["tool"]]["kl"]
        row["ppl_parent"] = found["parent"]["perplexity"]


def evaluation(options: dict[str, str], model: Path) -> Tensor:
    """Held-out token windows (held_out, length)."""
    tokenizer = Parent(model, model.name).tokenizer
    return windows(
        tokenizer, Text(source=options["evaluation"]), int(options["length"]), int(options["held_out"])
    ).windows


def machine(device: str) -> str:
    """cpu, or the accelerator's name: h200."""
    return "cpu" if device == "cpu" else torch.cuda.get_device_name().split()[-1].lower()
