"""What Tare must know about an architecture, as data. One file per architecture; a new one is a new file with an ARCH.

`arch_of(config)` finds it by `model_type`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qat import plugins


@dataclass(frozen=True)
class BiasSlots:
    """Which linears of a block an engine gives a bias, `always` or by a config flag. Others' it drops silently."""

    always: tuple[str, ...] = ()
    by_flag: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def all(self) -> frozenset[str]:
        return frozenset(self.always).union(*self.by_flag.values())


@dataclass(frozen=True)
class Arch:
    """Module names are relative to a block unless they say otherwise.

    linears: in the order they run. shared_input: linears that read the same tensor; the engines fuse them, so they
    share input statistics and per-tensor scales. norm_pairs: (norm, or earlier linear) -> linears its output feeds,
    where a per-channel factor can be folded. bias_slots: per engine. relabel_to: the architecture whose graph is the
    same when the config fields in `relabel_when` have the given values, written out as `relabel_fields` (target field
    -> value).
    """

    model_types: tuple[str, ...]
    class_name: str
    linears: tuple[str, ...]
    shared_input: tuple[tuple[str, ...], ...]
    norm_pairs: tuple[tuple[str, tuple[str, ...]], ...]
    bias_slots: Mapping[str, BiasSlots]
    relabel_to: str | None = None
    relabel_when: Mapping[str, Any] = field(default_factory=dict)
    relabel_fields: Mapping[str, Any] = field(default_factory=dict)
    blocks: str = "model.layers"
    embed: str = "model.embed_tokens"
    norm: str = "model.norm"
    rotary: str = "model.rotary_emb"
    head: str = "lm_head"

    def block_linears(self, block: int) -> list[str]:
        """Full names of the linears of one block."""
        return [f"{self.blocks}.{block}.{name}" for name in self.linears]


def known() -> dict[str, Arch]:
    """Every architecture by each of its model types."""
    archs = [importlib.import_module(f"qat.arch.{name}").ARCH for name in plugins.names("qat.arch")]
    return {model_type: arch for arch in archs for model_type in arch.model_types}


def arch_of(config: Any) -> Arch:
    """The `Arch` of a Hugging Face config. Raises ValueError, listing the known ones, for any other architecture."""
    archs = known()
    model_type = getattr(config, "model_type", None)
    if model_type not in archs:
        shown = (getattr(config, "architectures", None) or [model_type])[0]
        raise ValueError(
            f"architecture {shown} (model_type {model_type!r}) is not known; known: {', '.join(sorted(archs))}. "
            f"A new one is one data file, qat/arch/{model_type}.py"
        )
    return archs[model_type]
