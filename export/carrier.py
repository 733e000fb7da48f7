"""How a bias reaches the engine.

Engines load the bias of a linear only where their model class declares one; any other they drop without a word, and
one that is declared but not stored they leave uninitialised. So the exported config either turns on the flags of the
parent's own class, or names a class with the same graph and more bias slots (the model is relabelled: Qwen2 and Mistral
without a sliding window compute what Llama computes), and every declared slot is written in every block, zeros where
nothing was learned.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import CONFIG_MAPPING, AutoTokenizer, PretrainedConfig

from qat.arch import Arch, BiasSlots, known
from qat.coverage import base

SERVED_IN = ("bfloat16", "float16")
PLUGIN = "vllm_plugin"
READER = "transformers"  # also runs what is written for other engines, so its slots count when it costs nothing


@dataclass(frozen=True)
class Carrier:
    """The model class that an export is written for.

    config: the whole config.json but for `quantization_config`. biases: linears, relative to a block, that have a bias
    in every block. relabelled: whether the class is not the parent's. by_plugin: those of `biases` that are stored as
    comp_bias.
    """

    arch: Arch
    config: dict[str, Any]
    biases: frozenset[str]
    relabelled: bool
    by_plugin: frozenset[str] = frozenset()

    @property
    def dtype(self) -> torch.dtype:
        """What the model is served in."""
        dtype: torch.dtype = getattr(torch, self.config["dtype"])
        return dtype

    @property
    def tied_head(self) -> str | None:
        """Name of the tensor that a tied model leaves out."""
        return f"{self.arch.head}.weight" if self.config.get("tie_word_embeddings") else None

    def linears(self) -> list[str]:
        """Full names of all linears of the decoder blocks."""
        return [name for block in range(self.config["num_hidden_layers"]) for name in self.arch.block_linears(block)]

    def stored_bias(self, name: str) -> str:
        """Under which name the bias `name` of a linear, or any other tensor, is stored."""
        owner = name.removesuffix(".bias")
        leaf = owner.removeprefix(self.arch.blocks + ".").partition(".")[2]
        return f"{owner}.comp_bias" if name != owner and leaf in self.by_plugin else name

    def bias_names(self) -> list[str]:
        """Full names of the biases that must be stored."""
        names = []
        for block in range(self.config["num_hidden_layers"]):
            here = self.biases & set(self.arch.at(block).linears)
            names += [f"{self.arch.blocks}.{block}.{leaf}.bias" for leaf in sorted(here)]
        return names

    def unquantized(self, quantized: Collection[str]) -> list[str]:
        """Full names of what is not in `quantized`, routers and head included: what formats list as exceptions.

        Experts of which none is quantized are named as a whole as well: engines look for the module that holds them.
        """
        done, names = set(quantized), []
        for block in range(self.config["num_hidden_layers"]):
            here, linears = self.arch.at(block), self.arch.block_linears(block)
            names += [name for name in linears if name not in done] + self.arch.block_routers(block)
            whole = f"{self.arch.blocks}.{block}.{here.experts}"
            if here.experts and done.isdisjoint(name for name in linears if name.startswith(whole + ".")):
                names.append(whole)
        return [*names, self.arch.head]


def keep_tokenizer(carrier: Carrier, parent: Path, out: Path) -> None:
    """Name the tokenizer's class in `out` where transformers would choose another one by the new model type.

    Raises ValueError when the tokenizer in `out` does not come out equal to the one in `parent`.
    """
    file = out / "tokenizer_config.json"
    if not carrier.relabelled or not file.is_file():
        return
    ours = AutoTokenizer.from_pretrained(parent, trust_remote_code=False)
    if _same_tokenizer(ours, AutoTokenizer.from_pretrained(out, trust_remote_code=False)):
        return
    name = type(ours).__name__
    name = "PreTrainedTokenizerFast" if name == "TokenizersBackend" else name  # as transformers 4 calls it
    fields = json.loads(file.read_text(encoding="utf-8")) | {"tokenizer_class": name}
    file.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if not _same_tokenizer(ours, AutoTokenizer.from_pretrained(out, trust_remote_code=False)):
        raise ValueError(
            f"{parent}: as model_type {carrier.config['model_type']} transformers makes another tokenizer of these "
            "files; save the parent's tokenizer as PreTrainedTokenizerFast, which does not depend on the model"
        )


def _same_tokenizer(a: Any, b: Any) -> bool:
    return bool(a.backend_tokenizer.to_str() == b.backend_tokenizer.to_str())


def trainable_biases(arch: Arch, config: PretrainedConfig, engines: Collection[str]) -> tuple[frozenset[str], str]:
    """Linears, relative to a block, whose bias all `engines` load; and a sentence on those left out, or ''.

    Example: all seven for Llama; for Qwen2 too, as it can be relabelled; q, k and v for Qwen2 with a sliding window.
    """
    best = max((way.slots for way in _ways(arch, config, engines)), key=len)
    out = [leaf for leaf in arch.linears if leaf not in best]
    if not out:
        return best, ""
    return best, f"no bias is learned for {_listed(out)}: {_why_not(arch, config, engines, out)}"


def carrier(
    arch: Arch, config: PretrainedConfig, engines: Collection[str], biased: Collection[str], dtype: str | None = None
) -> Carrier:
    """The class and config that carry a bias on each of the linears `biased` (relative to a block) into all `engines`.

    dtype: what the model is served in, by default the parent's if that has 16 bits, else bfloat16. Raises ValueError
    when there is no such class, naming linears, engine and ways out.
    """
    ways = [way for way in _ways(arch, config, engines) if way.slots >= set(biased)]
    if not ways:
        best = max((way.slots for way in _ways(arch, config, engines)), key=len)
        lost = [leaf for leaf in arch.linears if leaf in set(biased) - best]
        raise ValueError(
            f"there are biases on {_listed(lost or sorted(biased))} of {arch.class_name}, but "
            f"{_why_not(arch, config, engines, lost)}. Export for other engines, or train without those biases "
            "(train again with these engines, or train.learn: {bias: null})"
        )
    target, readers = ways[0].target, ways[0].readers
    fields = _fields(arch, target, config)
    slots_of = [target.bias_slots[base(engine)] for engine in readers]
    declared = [(flag, set(leaves)) for slots in slots_of for flag, leaves in slots.by_flag.items()]
    on = {flag for flag, leaves in declared if fields.get(flag) or leaves & set(biased)}
    always = {leaf for slots in slots_of for leaf in slots.always}
    needed = always.union(*(leaves for flag, leaves in declared if flag in on))
    for flag, leaves in (item for slots in slots_of for item in slots.unless.items()):
        fields.pop(flag, None)
        if needed.intersection(leaves) and not set(biased).intersection(leaves):
            fields[flag] = False  # other readers need the zeros; to add them would cost a kernel in each block
    by_plugin = frozenset(set(biased) - needed) if PLUGIN in readers else frozenset()
    config_json = _for_readers(fields | dict.fromkeys(on, True), target, _served_in(config, dtype))
    return Carrier(target, config_json, by_plugin | needed, target is not arch, by_plugin)


class _Way(NamedTuple):
    """An architecture to write, and the linears whose bias all `readers` load in it."""

    target: Arch
    slots: frozenset[str]
    readers: list[str]


def _ways(arch: Arch, config: PretrainedConfig, engines: Collection[str]) -> Iterator[_Way]:
    """All there are, the preferred first."""
    targets = [arch]
    if arch.relabel_to and not _obstacles(arch, config):
        targets.append(known()[arch.relabel_to])
    # no other reader knows what is written for the plugin
    for readers in (sorted({*engines, READER} - ({READER} if PLUGIN in engines else set())), sorted(set(engines))):
        for target in targets:
            missing = [engine for engine in readers if base(engine) not in target.bias_slots]
            if missing:
                raise ValueError(
                    f"it is not known which biases {missing[0]} loads for {target.class_name} (known for "
                    f"{', '.join(target.bias_slots)}); add it to bias_slots in qat/arch"
                )
            slots = frozenset.intersection(*(slots_in(target, engine).all() for engine in readers))
            yield _Way(target, slots, readers)


def slots_in(arch: Arch, engine: str) -> BiasSlots:
    """The biases that an engine loads; with tare-vllm those of all linears but experts."""
    if engine != PLUGIN:
        return arch.bias_slots[base(engine)]
    return BiasSlots(always=tuple(leaf for leaf in arch.linears if f"{arch.experts}." not in leaf))


def _listed(leaves: Collection[str]) -> str:
    """`leaves` in words, * for the number of an expert."""
    return ", ".join(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", leaf) for leaf in leaves))


def _obstacles(arch: Arch, config: PretrainedConfig) -> list[str]:
    """The config fields that forbid relabelling, as `sliding_window is 4096`."""
    values = {field: getattr(config, field, None) for field in arch.relabel_when}
    return [f"{field} is {value}" for field, value in values.items() if value != arch.relabel_when[field]]


def _why_not(arch: Arch, config: PretrainedConfig, engines: Collection[str], leaves: Collection[str]) -> str:
    losing = [engine for engine in sorted(engines) if not slots_in(arch, engine).all() >= set(leaves)]
    why = f"{' and '.join(losing)} would drop them in {arch.class_name}"
    if not arch.relabel_to:
        return f"{why}, and no other architecture computes the same"
    obstacles = _obstacles(arch, config)
    return f"{why}, and it cannot be written as {arch.relabel_to}: {', '.join(obstacles) or 'that drops them too'}"


def _fields(arch: Arch, target: Arch, config: PretrainedConfig) -> dict[str, Any]:
    """Every config field of the target's class: the parent's values, then those that relabelling asks for."""
    written = config
    if target is not arch:
        config_class = CONFIG_MAPPING[target.model_types[0]]
        shared = config_class().to_dict().keys() - {"model_type"}
        parent = {key: value for key, value in config.to_dict().items() if key in shared}
        written = config_class.from_dict(parent | dict(arch.relabel_fields))
    fields: dict[str, Any] = written.to_diff_dict()  # leaves out only what differs from no model's config at all
    for key in ("transformers_version", "quantization_config"):
        fields.pop(key, None)
    if config.transformers_version:  # the parent's: tells readers how its tokenizer was saved
        fields["transformers_version"] = config.transformers_version
    return fields


def _for_readers(fields: dict[str, Any], target: Arch, dtype: str) -> dict[str, Any]:
    """config.json, with transformers 4's names beside those of 5: TensorRT-LLM 1.2, AutoAWQ and AutoGPTQ run on 4."""
    fields = fields | {"architectures": [target.class_name], "dtype": dtype, "torch_dtype": dtype}
    flags = [flag for slots in target.bias_slots.values() for flag in slots.by_flag]
    fields = dict.fromkeys(flags, False) | fields  # TensorRT-LLM's Phi3 reads one that transformers does not know
    rope = fields.get("rope_parameters") or {}
    if "sliding_attention" in rope and "full_attention" in rope:  # Gemma 3 has two kinds
        fields["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        fields["sliding_window_pattern"] = fields.get("_sliding_window_pattern")
        rope = rope["full_attention"]
    if "rope_theta" in rope:
        scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
        fields["rope_theta"] = rope["rope_theta"]
        fields["rope_scaling"] = scaling if scaling.get("rope_type", "default") != "default" else None
    if "partial_rotary_factor" in rope:
        fields["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if target.experts and "mlp_only_layers" in fields:
        fields["num_experts"] = fields["num_local_experts"]
    return dict(sorted(fields.items()))


def _served_in(config: PretrainedConfig, dtype: str | None) -> str:
    own = str(config.dtype).removeprefix("torch.")
    chosen = dtype or (own if own in SERVED_IN else SERVED_IN[0])
    if chosen not in SERVED_IN:
        raise ValueError(f"model.dtype {chosen!r}: quantized models are served in {' or '.join(SERVED_IN)}")
    return chosen
