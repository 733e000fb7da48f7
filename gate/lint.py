"""Read an exported directory and say everything in it that an engine would reject, misread, or drop without a word.

Headers first: files and index, then names, shapes and dtypes, then biases and the list of unquantized linears; then
what each engine demands (gate/engines, one file each); then the values; last, when the artifact is at hand, every
tensor against its source. It stops after the first level with faults, because later ones would only follow from them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path

from gate import _lint_files, _lint_names, _lint_values
from gate._check import Fault
from gate.readers import Export, open_export
from qat import coverage, plugins
from qat.artifact import Artifact
from qat.scheme import Section

VERSION = 3


class Options(Section):
    """Nothing to choose."""


def check(
    directory: Path | str,
    engines: Collection[str],
    artifact: Artifact | None = None,
    tp: int = 1,
    values: bool = True,
    headers_are_good: Callable[[], None] = lambda: None,
) -> list[Fault]:
    """Everything that is wrong with a directory, whoever wrote it; empty when it is good.

    engines: those that must load it (files of export/engines). artifact: what was exported. tp: ranks of tensor
    parallelism that it is to be served on. values: False for configs and headers alone. headers_are_good: called when
    they are, before the values are read.
    Example: `check("runs/demo/export/awq", ["vllm"]) == []`.
    """
    folder = Path(directory)
    faults = list(_lint_files.check(folder))
    if faults:
        return faults
    try:
        export = open_export(folder)
        for name in export.shapes:  # patterns of the config that cannot be compared with names are its fault
            export.excluded(name.removesuffix(".weight"))
    except ValueError as error:
        said = str(error).removeprefix(f"{folder}: ")
        return [Fault("config", str(folder), said, "the gate must be able to read it", "export it again")]
    levels: list[Callable[[], Iterator[Fault]]] = [
        partial(_lint_names.check, export, engines),
        partial(_engines, export, engines, tp),
    ]
    if faults := _first(levels):
        return faults
    headers_are_good()
    levels = []
    if values:
        levels.append(partial(_lint_values.check, export))
    if artifact is not None:
        levels.append(partial(_lint_values.compare, export, artifact))
    return _first(levels)


def _first(levels: Iterable[Callable[[], Iterator[Fault]]]) -> list[Fault]:
    """The faults of the first level that has any."""
    return next((faults for level in levels if (faults := list(level()))), [])


def _engines(export: Export, engines: Collection[str], tp: int) -> Iterator[Fault]:
    for engine in sorted(engines):
        if export.comp_bias and engine != "vllm_plugin":
            what = f"quant_method tare, with a comp_bias for {', '.join(sorted(export.comp_bias))}"
            yield Fault("engine", "config.json", what, f"only vllm with tare-vllm loads it, not {engine}", "install it")
    rules = {coverage.base(engine) for engine in engines}
    for engine in sorted(rules & set(plugins.names("gate.engines"))):
        yield from plugins.find("gate.engines", engine).check(export, tp)


def is_note(fault: Fault) -> bool:
    """Whether engines load it all the same and round once more: a loss that is a fault in our exports only."""
    return fault.kind == "rounded" or (fault.kind == "shared" and fault.where.endswith(".weight_scale"))


def report(faults: Iterable[Fault], at_most: int = 20) -> Iterator[str]:
    """Lines for a person: the first faults, and how many more there are.

    Faults that differ in nothing but the layer's number share a line: `model.layers.0..31.mlp.down_proj: ... (32
    layers)`.
    """
    lines = list(_folded(faults))
    yield from lines[:at_most]
    if len(lines) > at_most:
        yield f"... and {len(lines) - at_most} more"


LAYER = re.compile(r"(.*?\.)(\d+)\.")  # the first number of a tensor's name is its layer's
MARK = "\0"  # stands for it


def _folded(faults: Iterable[Fault]) -> Iterator[str]:
    layers: dict[str, set[int]] = {}
    for fault in faults:
        text, found = str(fault), LAYER.match(fault.where)
        if found:
            text = text.replace(found[0], f"{found[1]}{MARK}.")  # names of its neighbours as well
        layers.setdefault(text, set()).update([int(found[2])] if found else [])
    for text, numbers in layers.items():
        count = f" ({len(numbers)} layers)" if len(numbers) > 1 else ""
        yield text.replace(MARK, _ranges(numbers)) + count


def _ranges(numbers: Collection[int]) -> str:
    """`0..3,7` of 0, 1, 2, 3 and 7."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(sorted(numbers)), lambda at: at[1] - at[0])]
    return ",".join(f"{run[0]}..{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
