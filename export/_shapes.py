"""Rules that formats and engines have in common, told from names and shapes alone. No torch: a plan asks as well."""

from __future__ import annotations

from collections.abc import Sequence

from qat.arch import Arch
from qat.coverage import Layer


def check_multiples(who: str, layers: Sequence[Layer], rows: int = 1, columns: int = 1) -> None:
    """Outputs and inputs of every layer are multiples of what `who` (a format or engine) works in."""
    for layer in layers:
        for value, unit, what in ((layer.rows, rows, "outputs"), (layer.columns, columns, "inputs")):
            if value % unit:
                raise ValueError(
                    f"{layer.name} has {value} {what}; {who} takes multiples of {unit}. Leave it unquantized "
                    f"(scheme.skip: [{layer.name}]) or choose another of export.formats"
                )


def check_fused(who: str, layers: Sequence[Layer], arch: Arch) -> None:
    """Linears that read the same input are stored alike: engines run them as one."""
    by_name = {layer.name: layer.fmt for layer in layers}
    blocks = {arch.split(layer.name)[0] for layer in layers}
    for block in sorted(blocks):
        for names in arch.fused(block):
            for name in names[1:]:
                ours, first = by_name.get(name), by_name.get(names[0])
                if ours != first:
                    raise ValueError(
                        f"{name} is {ours or 'not quantized'}, {names[0]} is {first or 'not quantized'}: {who} runs "
                        "them as one linear; give all of them the same scheme.overrides, or skip all"
                    )
