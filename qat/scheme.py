"""The words of quantization that every other file uses: how a tensor is stored, and which tensors of a model are.

Nothing here needs torch, so recipes are read and planned without it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """`, did you mean 'steps'? (known: batch, steps)`: what to add to an error about a misspelt `word`."""
    known = list(known)
    close = difflib.get_close_matches(str(word), known, n=1)
    return (f", did you mean {close[0]!r}?" if close else "") + f" (known: {', '.join(known) or 'none'})"


class Section(BaseModel):
    """A part of a recipe: frozen, and an unknown key is an error that names the known ones."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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


class TensorFormat(Section):
    """How one weight or activation tensor is stored.

    `per` says which values share one scale: the whole `tensor`, one output `channel` of a weight, a `group` of
    `group_size` consecutive inputs of one output channel, or one `token` of an activation.
    """

    dtype: Literal["int4", "fp8_e4m3"] = Field("int4", description="type of a code")
    per: Literal["tensor", "channel", "group", "token"] | None = Field(
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
        if self.dtype == "fp8_e4m3" and not self.symmetric:
            raise ValueError("fp8_e4m3 has no zero point; leave symmetric at true")
        if self.dtype == "fp8_e4m3" and self.per == "group":
            raise ValueError("fp8_e4m3 takes per: tensor, channel or token, not a group_size")
        if self.dtype == "int4" and self.per in ("tensor", "token"):
            raise ValueError(f"int4 takes per: group or channel, not {self.per}")
        return self

    @property
    def is_int(self) -> bool:
        return self.dtype.startswith("int")

    @property
    def bits(self) -> int:
        return {"int4": 4, "fp8_e4m3": 8}[self.dtype]

    def group_of(self, in_features: int) -> int:
        """Inputs that share one scale in a row of `in_features` inputs."""
        return self.group_size or in_features

    def __str__(self) -> str:
        grain = f"g{self.group_size}" if self.per == "group" else str(self.per)
        return f"{self.dtype}-{grain}{'' if self.symmetric else '-asym'}{'-dynamic' if self.dynamic else ''}"


class Scheme(Section):
    """Which linears are quantized and how.

    `skip` and the keys of `overrides` are module names, or `*` patterns over them (`model.layers.0.*`). Linears outside
    the decoder blocks (the head, embeddings) are never quantized.
    """

    weights: TensorFormat = Field(TensorFormat(group_size=128), description="how weights are stored; group_size 128")
    inputs: TensorFormat | None = Field(None, description="how activations are (fp8 only); null: as they are")
    skip: tuple[str, ...] = Field(("lm_head",), description="linears that stay as they are; names or * patterns")
    overrides: dict[str, TensorFormat] = Field({}, description="name or * pattern -> another format of weights")

    @model_validator(mode="after")
    def _check(self) -> Scheme:
        for what, fmt in [("weights", self.weights), *self.overrides.items()]:
            if fmt.dynamic or fmt.per == "token":
                raise ValueError(f"{what}: a weight's scale is never dynamic or per token")
        if self.inputs is not None:
            if self.inputs.dtype != "fp8_e4m3" or self.weights.dtype != "fp8_e4m3":
                raise ValueError("inputs are quantized only beside fp8_e4m3 weights; leave scheme.inputs out for int4")
            pair = (self.weights.per, self.inputs.per, self.inputs.dynamic)
            if pair not in {("channel", "token", True), ("tensor", "tensor", False)}:
                raise ValueError(
                    "fp8 comes as weights per channel with inputs {per: token, dynamic: true}, or weights per tensor "
                    "with inputs {per: tensor, dynamic: false}: those are what the engines run"
                )
        elif self.weights.dtype == "fp8_e4m3":
            raise ValueError("fp8_e4m3 weights need scheme.inputs, e.g. {dtype: fp8_e4m3, per: token, dynamic: true}")
        if any(fmt.dtype != self.weights.dtype for fmt in self.overrides.values()):
            raise ValueError("overrides may change the group size, not the dtype, of scheme.weights")
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
        """What an export format must be able to hold: of int4, int4-asym, fp8-channel, fp8-tensor."""
        return frozenset(
            ("int4" if fmt.symmetric else "int4-asym") if fmt.is_int else f"fp8-{fmt.per}" for fmt in self.formats
        )

    @property
    def mixed_groups(self) -> bool:
        """True when overrides give some linears another group size."""
        return len({(fmt.per, fmt.group_size) for fmt in self.formats}) > 1

    def __str__(self) -> str:
        return str(self.weights) + (f"+{self.inputs}" if self.inputs else "")


def matches(pattern: str, name: str) -> bool:
    """True when `pattern`, where `*` stands for any run of characters, is the whole of `name`."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name) is not None
