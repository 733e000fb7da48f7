"""The words of quantization that every other file uses: how a tensor is stored, and which tensors of a model are.

Nothing here needs torch, so recipes are read and planned without it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

NOTHING: Mapping[str, str] = MappingProxyType({})


def did_you_mean(word: object, known: Iterable[str], also: Mapping[str, str] = NOTHING) -> str:
    """`, did you mean 'steps'? (known: batch, steps)`: what to add to an error about a misspelt `word`.

    also: other names -> the known one that is meant.
    """
    known = list(known)
    close = difflib.get_close_matches(str(word), [*known, *also], n=1) or [
        one for one in also if one == str(word).lower()
    ]
    meant = [also.get(one, one) for one in close]
    return (f", did you mean {meant[0]!r}?" if meant else "") + f" (known: {', '.join(known) or 'none'})"


class Section(BaseModel):
    """A part of a recipe: frozen, its numbers finite, and an unknown key is an error that names the known ones."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="wrap")
    @classmethod
    def _suggest_keys(cls, values: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        try:
            return handler(values)
        except ValidationError as error:
            lines = []
            for e in error.errors():
                kind, text = e["type"], e["msg"]
                if kind == "extra_forbidden" and len(e["loc"]) == 1:
                    kind, text = "unknown_key", "unknown key" + did_you_mean(e["loc"][0], cls.model_fields)
                lines.append(problem(e["loc"], text, e["input"], kind))
            raise problems(cls.__name__, lines) from None


def problem(loc: tuple[int | str, ...], text: str, value: object = None, kind: str = "value_error") -> InitErrorDetails:
    """One line of a `problems` error: `text` about what stands at the path `loc`."""
    # pydantic-core reads the text as a template only when it is given a context; it gets none
    return InitErrorDetails(type=PydanticCustomError(kind, text), loc=loc, input=value)


def problems(title: str, lines: list[InitErrorDetails]) -> ValidationError:
    """An error of several lines. Raised inside a validator, each line keeps its path below the field validated."""
    return ValidationError.from_exception_data(title, lines)


BLOCK = 128  # rows and columns of a block of weights that share one fp8 scale


class TensorFormat(Section):
    """How one weight or activation tensor is stored.

    `per` says which values share one scale: the whole `tensor`, one output `channel` of a weight, a `group` of
    `group_size` consecutive inputs of one output channel or token, a `block` of 128 x 128 weights, or one `token` of an
    activation.
    """

    dtype: Literal["int4", "int8", "fp8_e4m3"] = Field("int4", description="type of a code")
    per: Literal["tensor", "channel", "group", "block", "token"] | None = Field(
        None, description="which values share a scale; group or channel when left out, by group_size"
    )
    group_size: int | None = Field(None, gt=0, description="inputs that share a scale")
    symmetric: bool = Field(True, description="false: with a zero point (int4)")
    dynamic: bool = Field(False, description="activations: the scale is found while serving")

    @model_validator(mode="before")
    @classmethod
    def _fill_per(cls, values: object) -> object:
        if isinstance(values, dict) and values.get("per") is None:
            return {**values, "per": "group" if values.get("group_size") else "channel"}
        return values

    @model_validator(mode="after")
    def _check(self) -> TensorFormat:
        if (self.per == "group") != (self.group_size is not None):
            raise ValueError("group_size goes with per: group, and only with it")
        if self.dtype != "int4" and not self.symmetric:
            raise ValueError(f"{self.dtype} has no zero point here; leave symmetric at true")
        if self.dtype == "int4" and self.per not in ("group", "channel"):
            raise ValueError(f"int4 takes per: group or channel, not {self.per}")
        if self.dtype == "int8" and self.per not in ("group", "channel", "token"):
            raise ValueError(f"int8 takes per: group, channel or token, not {self.per}")
        return self

    @property
    def is_int(self) -> bool:
        return self.dtype.startswith("int")

    @property
    def bits(self) -> int:
        return {"int4": 4, "int8": 8, "fp8_e4m3": 8}[self.dtype]

    @property
    def scale_rows(self) -> int:
        """Outputs of a weight that share one scale, but for `per: tensor`: 128 for blocks, else 1."""
        return BLOCK if self.per == "block" else 1

    def group_of(self, in_features: int) -> int:
        """Inputs that share one scale in a row of `in_features` inputs; a block's last group may have fewer."""
        return BLOCK if self.per == "block" else self.group_size or in_features

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of the scale of a weight (rows, columns)."""
        if self.per == "tensor":
            return 1, 1
        return -(-rows // self.scale_rows), -(-columns // self.group_of(columns))

    def __str__(self) -> str:
        grain = f"g{self.group_size}" if self.per == "group" else str(self.per)
        return f"{self.dtype}-{grain}{'' if self.symmetric else '-asym'}{'-dynamic' if self.dynamic else ''}"


# what engines run beside quantized activations: (dtype, weights per) -> inputs (per, group size, dynamic), of the same
# dtype but for int4
PAIRS = {
    ("int4", "group"): ("tensor", None, False),
    ("int8", "channel"): ("token", None, True),
    ("fp8_e4m3", "channel"): ("token", None, True),
    ("fp8_e4m3", "tensor"): ("tensor", None, False),
    ("fp8_e4m3", "block"): ("group", BLOCK, True),
}


def kind_of(weights: TensorFormat, inputs: TensorFormat | None) -> str:
    """What an export format must be able to hold for a linear: int4, int4-asym, int8, w4a8, w8a8, fp8-channel,
    fp8-tensor or fp8-block. w8a8 is int8 in weights and inputs, w4a8 int4 weights with fp8 inputs."""
    if weights.dtype == "int4" and inputs is not None:
        return "w4a8"
    if weights.dtype == "int8":
        return "int8" if inputs is None else "w8a8"
    return f"fp8-{weights.per}" if not weights.is_int else "int4" if weights.symmetric else "int4-asym"


class Scheme(Section):
    """Which linears are quantized and how.

    `skip` and the keys of `overrides` are module names, or `*` patterns over them (`model.layers.0.*`). Linears outside
    the decoder blocks (the head, embeddings) are never quantized.
    """

    weights: TensorFormat = Field(TensorFormat(group_size=128), description="how weights are stored; group_size 128")
    inputs: TensorFormat | None = Field(
        None,
        description="how activations are: beside int8 weights {dtype: int8, per: token, dynamic: true}; beside "
        "fp8_e4m3 and int4 ones {dtype: fp8_e4m3, per: tensor}, or for fp8_e4m3 per: token or group, dynamic; null: as "
        "they are",
    )
    kv_cache: TensorFormat | None = Field(
        None, description="{dtype: fp8_e4m3, per: tensor}: static scales for an fp8 KV cache; null: the engine decides"
    )
    skip: tuple[str, ...] = Field(("lm_head",), description="linears that stay as they are; names or * patterns")
    overrides: dict[str, TensorFormat] = Field({}, description="name or * pattern -> another format of weights")

    @model_validator(mode="after")
    def _check(self) -> Scheme:
        weights, inputs = self.weights, self.inputs
        for what, fmt in [("weights", weights), *self.overrides.items()]:
            if fmt.dynamic or fmt.per == "token":
                raise ValueError(f"{what}: a weight's scale is never dynamic or per token")
            if not fmt.is_int and fmt.per == "group":
                raise ValueError(f"{what}: fp8_e4m3 weights take per: tensor, channel or block, not a group_size")
        if inputs is not None:
            fits = inputs.dtype == _inputs_of(weights.dtype) and weights.symmetric
            if not fits or (weights.dtype, weights.per) not in PAIRS:
                raise ValueError(
                    f"{weights} weights with {inputs} inputs are run by no engine; leave scheme.inputs out, or take "
                    f"{_pairs(weights.dtype)}"
                )
            if (inputs.per, inputs.group_size, inputs.dynamic) != PAIRS[weights.dtype, str(weights.per)]:
                raise ValueError(
                    f"{weights} weights with {inputs} inputs are run by no engine: {_pairs(weights.dtype)}"
                )
            if any(fmt != weights for fmt in self.overrides.values()):
                raise ValueError(
                    "overrides mix weight-only formats; with scheme.inputs all linears are alike: use skip"
                )
        elif weights.dtype == "fp8_e4m3":
            raise ValueError(f"fp8_e4m3 weights need scheme.inputs: {_pairs('fp8_e4m3')}")
        if any(fmt.is_int != weights.is_int for fmt in self.overrides.values()):
            raise ValueError("overrides may mix int4 and int8 weights; fp8_e4m3 goes with its own scheme.inputs")
        if self.kv_cache not in (None, KV_CACHE):
            raise ValueError(f"kv_cache is null or {{dtype: fp8_e4m3, per: tensor}}, not {self.kv_cache}")
        return self

    def format_of(self, name: str) -> TensorFormat | None:
        """The weight format of the linear `name`, or None when it stays as it is."""
        if any(matches(pattern, name) for pattern in self.skip):
            return None
        for pattern, fmt in self.overrides.items():
            if matches(pattern, name):
                return fmt
        return self.weights

    @property
    def formats(self) -> list[TensorFormat]:
        """Every weight format in use: that of `weights`, then those of the overrides."""
        return [self.weights, *self.overrides.values()]

    @property
    def kinds(self) -> frozenset[str]:
        """What an export format must be able to hold; of `kind_of`."""
        return frozenset(kind_of(fmt, self.inputs) for fmt in self.formats)

    @property
    def mixed_groups(self) -> bool:
        """True when overrides give some linears another dtype or group size."""
        return len({(fmt.dtype, fmt.per, fmt.group_size) for fmt in self.formats}) > 1

    def __str__(self) -> str:
        weights = "/".join(dict.fromkeys(map(str, self.formats)))
        parts = [weights, *([str(self.inputs)] if self.inputs else []), *(["kv8"] if self.kv_cache else [])]
        return "+".join(parts)


KV_CACHE = TensorFormat(dtype="fp8_e4m3", per="tensor")


def _inputs_of(dtype: str) -> str:
    return "fp8_e4m3" if dtype == "int4" else dtype


def _pairs(dtype: str) -> str:
    """The pairs of weights and inputs of one dtype, in words."""
    return " or ".join(
        f"weights {{dtype: {dtype}, per: {per}}} with inputs {{dtype: {_inputs_of(of)}, per: {inputs}"
        + (f", group_size: {size}" if size else "")
        + f", dynamic: {str(dynamic).lower()}}}"
        for (of, per), (inputs, size, dynamic) in PAIRS.items()
        if of == dtype
    )


def matches(pattern: str, name: str) -> bool:
    """True when `pattern`, where `*` stands for any run of characters, is the whole of `name`."""
    first, *between = pattern.split("*")
    if not between:
        return name == pattern
    *between, last = between
    if len(name) < len(first) + len(last) or not (name.startswith(first) and name.endswith(last)):
        return False
    at, end = len(first), len(name) - len(last)
    for part in between:  # the leftmost place leaves most for those after it
        at = name.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True
