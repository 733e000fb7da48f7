"""Whether the weight files of a parent fit its config: names, shapes and dtypes, from the headers alone.

A block more than the config says, or a module that the architecture does not have, would otherwise be left out without
a word; a block that is missing would be noticed after an hour.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from qat.arch import arch_of
from qat.checkpoint import Entry
from qat.model import refuse_stacked, skeleton

DTYPES = ("BF16", "F16", "F32")
AGAIN = "the files or config.json are those of another model, or not whole: fetch them again"


def check(config: Any, entries: Mapping[str, Entry], name: str) -> None:
    """Raise ValueError for a tensor that is missing, unknown to the architecture, of another shape, or no float.

    entries: of `SafetensorsFolder`. name: what the error calls the parent. A bias on any linear is welcome, as is a
    head beside tied embeddings.
    """
    arch = arch_of(config)
    refuse_stacked(arch, entries)
    root = skeleton(copy.deepcopy(config))  # which writes into it
    wanted = {key: tuple(parameter.shape) for key, parameter in root.named_parameters()}
    head = f"{arch.head}.weight"
    if getattr(config, "tie_word_embeddings", False):
        wanted.pop(head, None)
    spare = {f"{key}.bias" for key, module in root.named_modules() if isinstance(module, nn.Linear)} | {head}
    if missing := sorted(wanted.keys() - entries.keys()):
        raise ValueError(f"{name} lacks {_listed(missing)}, which {_model(arch, config)} has; {AGAIN}")
    if extra := sorted(entries.keys() - wanted.keys() - spare):
        raise ValueError(
            f"{name} holds {_listed(extra)}, for which {_model(arch, config)} has no place; {AGAIN}, or take them out"
        )
    for key, entry in entries.items():
        if key in wanted and entry.shape != wanted[key]:
            raise ValueError(f"{key} of {name} has shape {entry.shape}, but config.json says {wanted[key]}; {AGAIN}")
        if entry.dtype not in DTYPES:
            raise ValueError(
                f"{key} of {name} is {entry.dtype}; weights of a full-precision model are {', '.join(DTYPES)}. A "
                "quantized model is no parent: take the one that it was made from"
            )


def _model(arch: Any, config: Any) -> str:
    return f"{arch.class_name} of {config.num_hidden_layers} blocks"


def _listed(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
