"""The recipe: what to do, as one frozen object checked before anything runs. Never imports torch.

    load(["recipe=demo.yaml", "train.steps=50"])

reads the YAML file, puts the `dotted.key=value` overrides in, and validates the whole. All problems are reported at
once, each with its dotted path. `Recipe.model_validate(recipe.model_dump()) == recipe`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    SerializeAsAny,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from qat import arguments, plugins
from qat.arguments import RecipeError
from qat.compatibility import misfits, without_effect
from qat.scheme import Scheme, Section, did_you_mean, problem, problems
from qat.sections import Calibrate, Compute, Data, Export, ModelSource, OneOrMore, Train

__all__ = ["Recipe", "RecipeError", "load", "merge"]

OVERLAYS = ("scheme", "calibrate", "train", "export", "gate")
BOUNDS = ("max_", "min_")  # gate options that judge a measurement and do not change it
OWN = ("value_error", "unknown_key")  # kinds of errors with a whole sentence of ours
BARE = ("bool", "int", "float", "str")  # types that pydantic names so in the path of an error
FOLDER_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"


class Recipe(Section):
    """Everything a run depends on."""

    name: Annotated[str, StringConstraints(pattern=FOLDER_NAME)] = Field(
        description="folder of the run; the recipe's file name when left out"
    )
    model: ModelSource
    scheme: Scheme = Field({}, validate_default=True, description="which linears are stored how")
    data: Data
    calibrate: Calibrate = Field({}, validate_default=True)
    train: Train | list[Train] | None = Field(
        None, description="a list: stages that follow each other, each from what the last one left; null: no training"
    )
    export: Export = Field({}, validate_default=True)
    gate: dict[str, SerializeAsAny[Section]] | None = Field(
        None, description="a file of gate/ -> its bounds; null: no gate, nothing is refused"
    )
    variants: dict[str, dict[str, Any]] = Field(
        {}, description=f"name -> what differs in {', '.join(OVERLAYS)} (bounds only); same parent, data and teacher"
    )
    compute: Compute = Field({}, validate_default=True)
    until: Literal["calibrate", "train", "export", "gate"] | None = Field(None, description="the last stage to run")
    fresh: Annotated[list[Literal["calibrate", "train", "export", "gate", "release"]], OneOrMore] = Field(
        [], description="stages to redo though they are finished"
    )
    output: str = Field("runs", description="where run folders are made")

    @property
    def folder(self) -> Path:
        """The folder of this run."""
        return Path(self.output) / self.name

    @property
    def trainings(self) -> list[Train]:
        """The stages of training in order; none without a train section."""
        return self.train if isinstance(self.train, list) else [self.train] if self.train else []

    @cached_property
    def by_variant(self) -> list[tuple[str | None, Recipe]]:
        """The recipes to run: one for each variant, or [(None, this one)] without variants."""
        if not self.variants:
            return [(None, self)]
        base = self.model_dump()
        return [(name, Recipe.model_validate(_overlaid(base, overlay))) for name, overlay in self.variants.items()]

    @field_validator("train", mode="before")
    @classmethod
    def _read_train(cls, value: Any) -> Any:
        """Read here, because the problems of a union would be those of every member."""
        if not isinstance(value, list):
            return value if value is None else Train.model_validate(value)
        if not value:
            raise ValueError("an empty list trains nothing; give at least one stage, or null")
        found, lines = [], []
        for index, one in enumerate(value):
            try:
                found.append(Train.model_validate(one))
            except ValidationError as error:
                lines += [problem((index, *e["loc"]), e["msg"], e["input"], e["type"]) for e in error.errors()]
        if lines:
            raise problems("train", lines)
        return found

    @field_validator("gate", mode="before")
    @classmethod
    def _check_gate(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        found, lines = {}, []
        for name, options in value.items():
            try:
                found[name] = plugins.options("gate", str(name)).model_validate({} if options is None else options)
            except ValidationError as error:
                lines += [problem((name, *e["loc"]), e["msg"], e["input"], e["type"]) for e in error.errors()]
            except ValueError as error:
                lines.append(problem((name,), str(error)))
        if lines:
            raise problems("gate", lines)
        return found

    @field_validator("variants")
    @classmethod
    def _check_variants(cls, value: dict[str, dict[str, Any]], info: ValidationInfo) -> dict[str, dict[str, Any]]:
        lines, measured = [], info.data.get("gate") or {}
        for name, overlay in value.items():
            if not name.replace("_", "").replace("-", "").isalnum() or not name.isascii():
                lines.append(problem((name,), "a variant's name becomes a folder: use letters, digits, - and _"))
            for key in overlay:
                if key not in OVERLAYS:
                    why = "cannot differ between variants" + did_you_mean(key, OVERLAYS)
                    lines.append(problem((name, key), why))
            gate = overlay.get("gate", {})
            if not isinstance(gate, Mapping):
                lines.append(problem((name, "gate"), "every variant is judged: give the bounds that differ"))
                continue
            for check, bounds in gate.items():
                if check not in measured:
                    lines.append(problem((name, "gate", check), "is not in the gate section, which all share"))
                for option in bounds if isinstance(bounds, Mapping) else ():
                    if not option.startswith(BOUNDS):
                        why = f"cannot differ between variants; only bounds can ({', '.join(BOUNDS)}...)"
                        lines.append(problem((name, "gate", check, option), why))
        if lines:
            raise problems("variants", lines)
        return value

    @model_validator(mode="after")
    def _check_together(self) -> Recipe:
        lines = []
        if self.train and not self.data.training:
            lines.append(problem(("data", "training"), "train needs text: name it here, or set train to null"))
        if self.gate is not None and not self.data.evaluation:
            lines.append(problem(("data", "evaluation"), "the gate needs held-out text: name it here"))
        if self.until == "gate" and self.gate is None:
            lines.append(problem(("until",), "gate, but this recipe has no gate section"))
        lines += [problem(path, why) for path, why in without_effect(self)]
        lines += [problem(("export", key), why) for key, why in misfits(self.scheme, self.export)]
        if lines:
            raise problems("Recipe", lines)
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _check_each_variant(cls, values: Any, handler: ModelWrapValidatorHandler[Recipe]) -> Recipe:
        """Validate every variant as a whole recipe; report what is wrong there and not already in the base."""
        recipe, errors = None, []
        try:
            recipe = handler(values)
        except ValidationError as error:
            errors = error.errors()
        base = recipe.model_dump() if recipe else values
        variants = base.get("variants") if isinstance(base, dict) else None
        lines = [problem(e["loc"], e["msg"], e["input"], e["type"]) for e in errors]
        known = {(e["loc"], e["msg"]) for e in errors}
        for name, overlay in variants.items() if isinstance(variants, dict) else ():
            if not isinstance(overlay, dict):
                continue  # the field's own error says so
            try:
                cls.model_validate(_overlaid(base, {key: overlay[key] for key in overlay if key in OVERLAYS}))
            except ValidationError as error:
                new = [e for e in error.errors() if (e["loc"], e["msg"]) not in known]
                lines += [problem(("variants", name, *e["loc"]), e["msg"], e["input"], e["type"]) for e in new]
        if lines or recipe is None:
            raise problems(cls.__name__, lines)
        return recipe


def _overlaid(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """What the recipe of a variant is validated from."""
    return {**merge(base, overlay), "variants": {}}


def merge(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """`overlay` deeply over `base`; a scalar, list or null replaces.

    So does a mapping whose `name` or `dtype` is another one: the keys beside it belong to what it names.
    """
    merged = dict(base)
    for key, new in overlay.items():
        old = merged.get(key)
        if isinstance(new, Mapping) and isinstance(old, Mapping):
            is_other = any(new.get(kind, old.get(kind)) != old.get(kind) for kind in ("name", "dtype"))
            merged[key] = dict(new) if is_other else merge(old, new)
        else:
            merged[key] = new
    return merged


def load(argv: list[str]) -> Recipe:
    """The recipe of a command line: `recipe=FILE` and `dotted.key=value`. Raises RecipeError with all problems."""
    file, values, wrong = arguments.read(argv)
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        wrong += _lines(error)
    if wrong:
        lines = "\n".join(f"  {line}" for line in dict.fromkeys(wrong))
        raise RecipeError(f"{file} is not a valid recipe:\n{lines}")
    return recipe


def _lines(error: ValidationError) -> Iterator[str]:
    """What is wrong, a line for each path: `train.steps: input should be a valid integer, got 'ten'`.

    Of a value that may be of several types pydantic says what is wrong for each; these become one line.
    """
    found = dict[tuple[int | str, ...], list[str]]()
    for e in error.errors():
        path = tuple(part for part in e["loc"] if part != "[key]")
        if path and _is_type(path[-1], e["type"]):
            told = _told(e["msg"], e["type"]).removeprefix("input should be ")
            found.setdefault(path[:-1], []).append(told)
        elif e["type"] != "default_factory_not_called":  # that only follows from another problem
            yield f"{_dotted(path)}: {_told(e['msg'], e['type'])}{_got(e['input'], e['type'])}"
    for path, ways in found.items():
        value = next(e["input"] for e in error.errors() if e["loc"][: len(path)] == path)
        said = ", or ".join(way.partition(", unable to")[0] for way in ways)
        yield f"{_dotted(path)}: input should be {said}{_got(value, 'union')}"


def _is_type(part: int | str, kind: str) -> bool:
    """Whether a part of a path is no key but one of the types that a value may have, as pydantic names it."""
    return isinstance(part, str) and (
        part.startswith(("literal[", "constrained-", "list[")) or (part in BARE and kind.startswith(part))
    )


def _dotted(path: tuple[int | str, ...]) -> str:
    return ".".join(map(str, path)) or "recipe"


def _told(text: str, kind: str) -> str:
    text = text.removeprefix("Value error, ")
    if kind in OWN:
        return text
    # pydantic names the class, which no recipe does
    text = re.sub(r"valid dictionary( or instance of \w+)?", "mapping of keys", text).replace(
        "valid tuple", "valid list"
    )
    return f"{text[0].lower()}{text[1:]}"


def _got(value: Any, kind: str) -> str:
    return "" if kind in (*OWN, "missing") else f", got {'null' if value is None else repr(value)}"
