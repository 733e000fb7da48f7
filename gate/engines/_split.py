"""How an engine divides a linear over the ranks of tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator

from gate._check import Fault
from gate.readers import Export

ALONG_INPUTS = ("o_proj", "down_proj", "w2")  # what closes a half of a block; all others are divided along outputs
DIVIDES = "serve with a number of ranks that divides it"
FEWER = "serve with fewer ranks, or quantize with a smaller group_size"


def part(export: Export, name: str, tp: int) -> tuple[int, int]:
    """(outputs, inputs) of a linear on one of `tp` ranks; rounded down where it does not divide."""
    rows, columns = export.shapes[f"{name}.weight"]
    leaf = name.rpartition(".")[2]
    if leaf in ALONG_INPUTS:
        return rows, columns // tp
    if leaf in ("k_proj", "v_proj"):  # key-value heads are copied when there are fewer than ranks
        return rows // min(tp, export.config.num_key_value_heads), columns
    return rows // tp, columns


def check_ranks(engine: str, export: Export, tp: int) -> Iterator[Fault]:
    """The model itself divides over the ranks: heads, key-value heads, and every linear."""
    config = export.config
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    if heads % tp:
        yield Fault("tp", "config.json", f"{heads} heads on {tp} ranks", f"{engine} gives each as many", DIVIDES)
    if shared % tp and tp % shared:
        rule = f"{engine} divides them evenly or copies them evenly"
        yield Fault("tp", "config.json", f"{shared} key-value heads on {tp} ranks", rule, DIVIDES)
    for index in range(config.num_hidden_layers):
        for name in export.arch.block_linears(index):
            rows, columns = export.shapes[f"{name}.weight"]
            along_inputs = name.endswith(ALONG_INPUTS)
            if (columns if along_inputs else rows) % tp and not name.endswith(("k_proj", "v_proj")):
                what = f"{columns} inputs" if along_inputs else f"{rows} outputs"
                yield Fault("tp", name, f"{what} on {tp} ranks", f"{engine} gives each as many", DIVIDES)


def check_unit(
    engine: str, kernel: str, export: Export, name: str, tp: int, rows: int, columns: int
) -> Iterator[Fault]:
    """A rank's outputs and inputs of the linear `name` are multiples of what the kernel works in."""
    on_ranks = f" on each of {tp} ranks" if tp > 1 else ""
    for value, unit, what in zip(part(export, name, tp), (rows, columns), ("outputs", "inputs"), strict=True):
        if value % unit:
            rule = f"{engine} ({kernel}) takes multiples of {unit}"
            yield Fault("kernel", name, f"{value} {what}{on_ranks}", rule, "leave it unquantized, or " + FEWER)
