"""How a bias reaches the engine, for each architecture, engine and linear: the README's table, from the data."""

from __future__ import annotations

from export.carrier import PLUGIN, slots_in
from qat.arch import Arch, known
from qat.coverage import base

ENGINES = {"vllm": "vLLM", PLUGIN: "vLLM + tare-vllm", "trtllm": "TensorRT-LLM", "transformers": "transformers"}
COLUMNS = {
    "q k v": ("q_proj", "k_proj", "v_proj", "qkv_proj"),
    "o": ("o_proj",),
    "gate up": ("gate_proj", "up_proj", "gate_up_proj"),
    "down": ("down_proj",),
}


def table() -> str:
    """Markdown: a row for each architecture and engine."""
    titles = ["architecture", "engine", *COLUMNS, "experts"]
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    archs = {arch.class_name: arch for arch in known().values()}
    for name, arch in sorted(archs.items()):
        for engine, title in ENGINES.items():
            plain = [leaf for leaf in arch.linears if "*" not in leaf]
            cells = []
            for leaves in COLUMNS.values():
                here = [leaf for leaf in plain if leaf.rpartition(".")[2] in leaves]
                ways = dict.fromkeys(way(arch, engine, leaf) for leaf in here)
                cells.append(", ".join(ways) or "")
            cells.append("none" if len(plain) < len(arch.linears) else "")
            lines.append(f"| {name.removesuffix('ForCausalLM')} | {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def way(arch: Arch, engine: str, leaf: str) -> str:
    """How the bias of a linear, relative to a block, gets there."""
    slots = arch.bias_slots[base(engine)]
    if leaf in slots.always:
        return "always"
    flag = next((flag for flag, leaves in slots.by_flag.items() if leaf in leaves), None)
    if flag:
        return f"`{flag}`"
    if arch.relabel_to and leaf in slots_in(known()[arch.relabel_to], engine).all():
        return f"as {arch.relabel_to.title()}" + (" or `comp_bias`" if engine == PLUGIN else "")
    return "`comp_bias`" if engine == PLUGIN else "none"
