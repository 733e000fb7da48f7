"""What Tare must know about an architecture, as data. One file per architecture; a new one is a new file with an ARCH.

`arch_of(config)` finds it by `model_type`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from qat import plugins


@dataclass(frozen=True)
class BiasSlots:
    """Which linears of a block an engine gives a bias, `always` or by a config flag. Others' it drops silently.

    unless: flag of the engine's own that, where a config has it as false, takes the bias of these away again.
    """

    always: tuple[str, ...] = ()
    by_flag: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unless: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def all(self) -> frozenset[str]:
        return frozenset(self.always).union(*self.by_flag.values())

    def loaded(self, config: Any) -> frozenset[str]:
        """Those that have one by a model's config."""
        on = [leaves for flag, leaves in self.by_flag.items() if getattr(config, flag, False)]
        off = [leaves for flag, leaves in self.unless.items() if not getattr(config, flag, True)]
        return frozenset(self.always).union(*on).difference(*off)


@dataclass(frozen=True)
class Arch:
    """Module names are those of hub checkpoints and engines, relative to a block unless they say otherwise.

    linears: in the order they run. shared_input: linears that read the same tensor, in the order they run; the engines
    fuse them, so they share input statistics and per-tensor scales. norm_pairs: (norm, or earlier linear) -> everything
    that its output feeds and nothing else reads it, so that a per-channel factor can be folded there; a consumer that
    is not in `linears` (a router) is not quantized, yet its columns take the factor too. norm_offset: norms multiply by
    norm_offset + weight. bias_slots: per engine. relabel_to: the architecture whose graph is the same when the config
    fields in `relabel_when` have the given values, written out as `relabel_fields` (target field -> value).

    Mixture of experts: `experts` is the module that holds them by number. In a data file a name below it has * for the
    number and stands for all of them; `arch_of` writes them out. gate_up_down: what an expert calls its three linears.
    routers: choose the experts; never quantized. dense: linears that only blocks without experts have. renamed: module
    of a block in checkpoints -> attribute of transformers. A model with both kinds of block (`dense_blocks` and others)
    has the names of both here: `at(block)` gives those of one.
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
    norm_offset: float = 0.0
    experts: str | None = None
    gate_up_down: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    routers: tuple[str, ...] = ()
    dense: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    dense_blocks: frozenset[int] = frozenset()
    blocks: str = "model.layers"
    embed: str = "model.embed_tokens"
    norm: str = "model.norm"
    rotary: str = "model.rotary_emb"
    head: str = "lm_head"

    def at(self, block: int) -> Arch:
        """The architecture as that block has it: without the experts of other blocks, or without their dense MLP."""
        if not self.dense_blocks:
            return self
        return _without(self, self._of_experts if block in self.dense_blocks else frozenset(self.dense).__contains__)

    def split(self, name: str) -> tuple[int, str]:
        """The block, and the name within it, of the full name of a module or tensor: (3, "mlp.up_proj")."""
        block, _, local = name.removeprefix(f"{self.blocks}.").partition(".")
        return int(block), local

    def shared(self, block: int) -> list[list[str]]:
        """Full names of the linears of one block by the tensor they read, in the order they run."""
        return [[f"{self.blocks}.{block}.{name}" for name in group] for group in self.at(block).shared_input]

    def block_linears(self, block: int) -> list[str]:
        """Full names of the linears of one block."""
        return [f"{self.blocks}.{block}.{name}" for name in self.at(block).linears]

    def block_routers(self, block: int) -> list[str]:
        """Full names of the routers of one block."""
        return [f"{self.blocks}.{block}.{name}" for name in self.at(block).routers]

    def fused(self, block: int) -> list[list[str]]:
        """Full names of linears of a block that engines run as one and quantize alike, all experts among them."""
        prefix, here = f"{self.blocks}.{block}.", self.at(block)
        groups = [list(group) for group in here.shared_input if not here._of_experts(group[0])]
        groups.append([name for name in here.linears if here._of_experts(name)])
        return [[prefix + name for name in group] for group in groups if group]

    def one_input_scale(self, block: int) -> list[list[str]]:
        """Full names of linears of a block that share a static input scale: engines take the largest of all experts.

        vLLM, process_fp8_input_tensor_strategy_moe; TensorRT-LLM's fused MoE has one scale as well.
        """
        prefix, groups = f"{self.blocks}.{block}.", dict[tuple[str, ...], list[str]]()
        for group in self.at(block).shared_input:
            of = tuple(name.rpartition(".")[2] if self._of_experts(name) else name for name in group)
            groups.setdefault(of, []).extend(prefix + name for name in group)
        return list(groups.values())

    def _of_experts(self, name: str) -> bool:
        return name in self.routers or (self.experts is not None and name.startswith(self.experts + "."))


def known() -> dict[str, Arch]:
    """Every architecture by each of its model types."""
    archs = [importlib.import_module(f"qat.arch.{name}").ARCH for name in plugins.names("qat.arch")]
    return {model_type: arch for arch in archs for model_type in arch.model_types}


def arch_of(config: Any) -> Arch:
    """The `Arch` of a Hugging Face config, its experts written out.

    Raises ValueError, listing the known ones, for any other architecture.
    """
    arch = find(config)
    if arch.experts is None:
        return arch
    experts, blocks = config.num_local_experts, range(config.num_hidden_layers)
    dense = frozenset(block for block in blocks if not _has_experts(config, block))
    if len(dense) == len(blocks):
        return _without(arch, arch._of_experts)
    if not dense:
        arch = _without(arch, frozenset(arch.dense).__contains__)
    return _written_out(replace(arch, dense_blocks=dense), experts)


def find(config: Any) -> Arch:
    """What the data file for the config's `model_type` says. Raises ValueError, listing the known ones."""
    archs = known()
    model_type = getattr(config, "model_type", None)
    if not isinstance(model_type, str) or model_type not in archs:
        listed = getattr(config, "architectures", None)
        shown = listed[0] if isinstance(listed, list) and listed else model_type
        raise ValueError(
            f"architecture {shown} (model_type {model_type!r}) is not known; known: {', '.join(sorted(archs))}. "
            f"A new one is one data file, qat/arch/{model_type}.py"
        )
    return archs[model_type]


def _has_experts(config: Any, block: int) -> bool:
    """The rule of Qwen-MoE configs; a config without these fields has experts in every block."""
    only_dense, step = getattr(config, "mlp_only_layers", None) or (), getattr(config, "decoder_sparse_step", 1)
    return config.num_local_experts > 0 and block not in only_dense and (block + 1) % step == 0


def _without(arch: Arch, gone: Callable[[str], bool]) -> Arch:
    """`arch` without the modules that are `gone`; what they share an input or a norm with is of their kind."""
    return replace(
        arch,
        linears=tuple(name for name in arch.linears if not gone(name)),
        shared_input=tuple(group for group in arch.shared_input if not any(map(gone, group))),
        norm_pairs=tuple(pair for pair in arch.norm_pairs if not any(map(gone, (pair[0], *pair[1])))),
        experts=None if gone(f"{arch.experts}.*") else arch.experts,
        routers=tuple(name for name in arch.routers if not gone(name)),
        dense_blocks=frozenset(),
    )


def _written_out(arch: Arch, count: int) -> Arch:
    """`arch` with `count` experts in place of each *."""
    of = [[name.replace("*", str(number)) for number in range(count)] for name in arch.linears if "*" in name]
    names = dict(zip([name for name in arch.linears if "*" in name], of, strict=True))

    def each(name: str) -> list[str]:
        return names.get(name, [name])

    def all_of(names: Iterable[str]) -> tuple[str, ...]:
        """By expert, then in the given order."""
        plain = tuple(name for name in names if "*" not in name)
        return plain + tuple(chain(*zip(*(each(name) for name in names if "*" in name), strict=True)))

    pairs: list[tuple[str, tuple[str, ...]]] = []
    for source, consumers in arch.norm_pairs:
        if "*" in source:
            pairs += zip(each(source), zip(*map(each, consumers), strict=True), strict=True)
        else:
            pairs.append((source, all_of(consumers)))
    linears = all_of(arch.linears)
    groups = chain(*(zip(*map(each, group), strict=True) for group in arch.shared_input))
    return replace(
        arch,
        linears=linears,
        shared_input=tuple(sorted(groups, key=lambda group: linears.index(group[0]))),  # an expert after the other
        norm_pairs=tuple(pairs),
    )
