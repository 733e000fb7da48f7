"""What every reader of an exported directory has in common."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import regex
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from gate.readers._headers import Entry, read_header, weight_files
from qat.arch import Arch, arch_of
from qat.checkpoint import SafetensorsFolder
from qat.model import skeleton
from qat.parent import read_config

# fp8 with a scale for each token, the same in int8, fp8 with one for each 128 inputs of a token; a static float32 scale
# of fp8; or activations left alone
InputQuant = Literal["token", "int8-token", "group"] | Tensor | None
BLOCK = 128
COMP = ".comp_bias"
FLOATS = ("F16", "BF16", "F32")
SECONDS = 0.5  # for a regular expression of a config, on one name


class Shape(BaseModel):
    """The types of what a reader looks at in a quantization config, which may come from anywhere."""

    model_config = ConfigDict(strict=True)


class Spec(NamedTuple):
    """What the format's definition says of one stored tensor: allowed dtypes, allowed shapes."""

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    required: bool = True


class BrokenRule(NamedTuple):
    """A stored value that the format does not allow: part of the linear, what is there, the rule, the way out."""

    part: str
    value: str
    rule: str
    way_out: str


class Export(ABC):
    """An exported directory as a plain Hugging Face checkpoint: a `Tensors` source for `qat.model.Model`.

    `names()` and `get()` show X.weight dequantized to float32, biases and untouched parameters; the stored parts are
    hidden and come through `codes`, `scale`, `zero` and `input_quant`. Only the tensor asked for is in memory. A bias
    that the architecture does not declare is shown as well: `gate/lint.py` is what refuses it.

    A format gives PARTS (tensors beside X.weight and X.bias that make X a quantized linear), the SHAPE of its config
    and the methods below.
    comp_bias: linears, relative to a block, whose bias is stored for tare-vllm, as X.comp_bias; shown as X.bias.
    Raises ValueError for a directory that contradicts the format.
    """

    PARTS: frozenset[str] = frozenset()
    SHAPE: type[Shape] = Shape

    def __init__(self, folder: Path, quantization: dict[str, Any], comp_bias: Collection[str] = ()) -> None:
        self.folder, self.quantization, self.comp_bias = folder, quantization, frozenset(comp_bias)
        self.format = type(self).__module__.rpartition(".")[2]
        self._check_shape(quantization)
        self.stored: dict[str, Entry] = {}
        for file in weight_files(folder):
            self.stored.update(read_header(folder / file))
        self.config = self._read_config()
        self.arch: Arch = arch_of(self.config)
        self._files = SafetensorsFolder(folder)
        owners = (name.rpartition(".") for name in self.stored)
        self.linears = sorted({owner for owner, _, part in owners if part in self.PARTS})
        self._quantized = frozenset(self.linears)
        self._hidden = {f"{linear}.{part}" for linear in self.linears for part in self.PARTS}
        self.check()

    def _check_shape(self, quantization: dict[str, Any]) -> None:
        try:
            self.SHAPE.model_validate(quantization)
        except ValidationError as error:
            said = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise ValueError(f"{self.folder}: the quantization config is not one of {self.format}: {said}") from error

    def _read_config(self) -> Any:
        config = read_config(self.folder)
        config.__dict__.pop("quantization_config", None)
        for key in ("num_hidden_layers", "num_local_experts"):  # before anything is made of that size
            count = getattr(config, key, 1)
            if type(count) is not int or not 0 <= count <= len(self.stored):
                raise ValueError(f"{self.folder}: config.json has {key} {count!r}, for {len(self.stored)} tensors")
        named = getattr(config, "architectures", None) or []
        if not isinstance(named, list) or not all(isinstance(one, str) for one in named):
            raise ValueError(f"{self.folder}: config.json has architectures {named!r}; a list of names is expected")
        dtype = getattr(config, "dtype", None)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(
                f"{self.folder}: config.json has dtype {dtype!r}; bfloat16, float16 or float32 is expected"
            )
        return config

    def check(self) -> None:  # noqa: B027
        """Raise ValueError when the quantization config asks for something this reader does not know."""

    @abstractmethod
    def codes(self, name: str) -> Tensor:
        """Codes (N, K) of a quantized linear: uint8 0..15, int8 -128..127, or float8 E4M3."""

    @abstractmethod
    def scale(self, name: str) -> Tensor:
        """float32 scale: (N, K / g), (N, 1), (1, 1), or (ceil N / 128, ceil K / 128) in blocks."""

    @abstractmethod
    def layout(self, name: str, rows: int, columns: int) -> dict[str, Spec]:
        """What must be stored for the linear `name` with `columns` inputs and `rows` outputs, by part."""

    def zero(self, name: str) -> Tensor | None:
        """uint8 zero point (N, K / g) as stored, or None when the format stores none."""
        return None

    def group_size(self, name: str) -> int | None:
        """Inputs that share a scale as the config declares it, or None for a whole row, tensor or block."""
        return None

    def in_blocks(self, name: str) -> bool:
        """Whether each 128 x 128 block of the linear's weight has a scale."""
        return False

    def stored_as(self, name: str) -> str:
        """How the config says the linear is stored, for comparison with those that an engine fuses it with."""
        return f"in groups of {self.group_size(name)}"

    def has_cache_scales(self) -> bool:
        """Whether the config declares an fp8 KV cache with static scales."""
        return False

    def cache_names(self, index: int) -> tuple[str, str]:
        """Names of the scales of keys and of values of a block."""
        attention = f"{self.arch.blocks}.{index}.self_attn"
        return f"{attention}.k_scale", f"{attention}.v_scale"

    def cache_scales(self, index: int) -> tuple[Tensor, Tensor] | None:
        """float32 scales (1,) of keys and values of a block, or None where the cache is not quantized."""
        if not self.has_cache_scales():
            return None
        keys, values = (self.raw(name).float().view(1) for name in self.cache_names(index))
        return keys, values

    def shared(self) -> tuple[str, ...]:
        """Parts that must be equal in linears which an engine fuses."""
        return ()

    def excluded(self, name: str) -> bool | None:
        """Whether the config keeps the linear `name` unquantized; None where the engine infers that from the files."""
        return None

    def broken_rules(self, name: str, rows: int, columns: int) -> Iterator[BrokenRule]:
        """Rules of this format alone that the stored values of the linear `name` break."""
        return iter(())

    def input_quant(self, name: str) -> InputQuant:
        """How the engine quantizes the activations that enter the linear `name`."""
        return None

    def keeps_float32(self, name: str) -> bool:
        """Whether engines keep the scales of the linear `name` in float32: those of fp8 and w8a8 codes."""
        entry = self.stored.get(f"{name}.weight")
        return entry is not None and entry.dtype in ("F8_E4M3", "I8")

    def weight(self, name: str) -> Tensor:
        """The float32 weight (N, K) of a quantized linear."""
        codes, scale = self.codes(name), self.scale(name)
        if self.in_blocks(name):
            row, column = (torch.arange(size) // BLOCK for size in codes.shape)
            return codes.float() * scale[row][:, column]
        if codes.dtype == torch.float8_e4m3fn:
            return codes.float() * scale
        groups = codes.float().view(*scale.shape, -1)
        return ((groups - self.offset(name, codes.dtype)) * scale[..., None]).view(codes.shape)

    def offset(self, name: str, dtype: torch.dtype) -> Tensor | float:
        """What is taken from the codes of a linear, which have this dtype, before they are scaled: (N, K / g, 1)."""
        zero, middle = self.zero(name), 0.0 if dtype == torch.int8 else 8.0
        return middle if zero is None else zero.float()[..., None] - (128 if dtype == torch.int8 else 0)

    def raw(self, name: str) -> Tensor:
        """A tensor as stored."""
        return self._files.get(name)

    def names(self) -> list[str]:
        """Names as in a plain Hugging Face checkpoint."""
        shown = {name for name in self.stored.keys() - self._hidden if not name.endswith((".k_scale", ".v_scale"))}
        shown = {f"{name.removesuffix(COMP)}.bias" if name.endswith(COMP) else name for name in shown}
        return sorted(shown | {f"{name}.weight" for name in self.linears})

    def get(self, name: str) -> Tensor:
        if name not in self.stored and name.endswith(".bias"):
            return self.raw(name.removesuffix(".bias") + COMP)
        owner = name.removesuffix(".weight")
        return self.weight(owner) if name.endswith(".weight") and owner in self._quantized else self.raw(name)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter that the config's architecture has, a tied head once.

        Raises ValueError when transformers can build no model from the config.
        """
        try:
            model = skeleton(copy.deepcopy(self.config))  # a copy, because the dtype is written into it
        except Exception as error:  # as in read_config
            raise ValueError(f"transformers cannot build {self.folder / 'config.json'}: {error!r}") from error
        return {name: tuple(p.shape) for name, p in model.named_parameters()}

    @property
    def size_on_disk(self) -> int:
        """Bytes of the weight files."""
        return sum((self.folder / file).stat().st_size for file in weight_files(self.folder))

    @property
    def bits_per_weight(self) -> float:
        """Stored bits of the quantized linears (codes, scales, zero points, biases...) per weight of theirs.

        Without quantized linears: the same for all linears of the decoder blocks.
        """
        blocks = range(self.config.num_hidden_layers)
        of = set(self.linears) or {name for index in blocks for name in self.arch.block_linears(index)}
        stored = sum(entry.num_bytes for name, entry in self.stored.items() if name.rpartition(".")[0] in of)
        return 8 * stored / sum(math.prod(self.shapes[f"{name}.weight"]) for name in of)

    @property
    def bits_per_parameter(self) -> float:
        """Stored bits of the whole model per parameter of the architecture."""
        return 8 * sum(e.num_bytes for e in self.stored.values()) / sum(map(math.prod, self.shapes.values()))


def fits(pattern: str, name: str) -> bool:
    """Whether a regular expression of a config fits the beginning of a name.

    Raises ValueError when it is none, or one that tries so many ways that it would keep a reader busy for ever.
    """
    try:
        return regex.match(pattern, name, timeout=SECONDS) is not None
    except (regex.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{pattern!r} in the quantization config is no regular expression: {error}") from error
    except TimeoutError as error:
        raise ValueError(
            f"{pattern!r} in the quantization config takes over {SECONDS} s to be compared with {name}; name the "
            "modules, or use a simpler pattern"
        ) from error


def unpack_nibbles(words: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32 (R, C) -> uint8 (R, 8 C): column 8 j + order[i] is bits 4 i .. 4 i + 3 of word j."""
    out = torch.empty(*words.shape, 8, dtype=torch.uint8)
    for i, place in enumerate(order):
        out[..., place] = ((words >> (4 * i)) & 15).to(torch.uint8)
    return out.flatten(1)


def unpack_bytes(words: Tensor) -> Tensor:
    """int32 (R, C) -> int8 (R, 4 C): column 4 j + i is bits 8 i .. 8 i + 7 of word j, less 128."""
    parts = [((words >> (8 * i)) & 255) - 128 for i in range(4)]
    return torch.stack(parts, -1).to(torch.int8).flatten(1)
