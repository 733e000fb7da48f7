"""The sections of a recipe: every key, what it means and its default, written once. `Recipe` puts them together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PositiveFloat,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from qat import plugins
from qat.scheme import Section, did_you_mean, problem, problems

OneOrMore = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)


class Choice(Section):
    """A plugin and its options: in YAML a bare name, or a mapping with the options beside the `name`."""

    name: str
    options: SerializeAsAny[Section]

    @model_serializer
    def _flat(self) -> dict[str, Any]:
        return {"name": self.name, **self.options.model_dump()}

    def __str__(self) -> str:
        return self.name


def choose(package: str, value: Any, kind: str = "Options") -> Choice:
    """Read `mse` or `{name: mse, grid: 20}` against the Options (or another class, `kind`) of the plugin it names."""
    if isinstance(value, Choice):
        return value
    flat = {"name": value} if isinstance(value, str) else value
    if not isinstance(flat, Mapping) or not isinstance(flat.get("name"), str):
        hint = did_you_mean(value, plugins.names(package))
        raise ValueError(f"{value!r} is not the name of a plugin, nor {{name: ..., option: ...}}{hint}")
    given = {key: option for key, option in flat.items() if key != "name"}
    options = plugins.options(package, flat["name"], kind).model_validate(given)
    return Choice.model_construct(name=flat["name"], options=options)


class ModelSource(Section):
    """The full-precision parent."""

    source: str = Field(description="hub id, local folder, .gguf file, demo (recipes/demo) or micro (random, 2 blocks)")
    revision: str | None = Field(None, description="branch, tag or commit of a hub id")
    dtype: Literal["bfloat16", "float16"] = Field("bfloat16", description="what the exported model is served in")
    trust_remote_code: bool = Field(False, description="run code that the model's folder brings along")


PACKED = {".xz", ".gz"}
TEXT_FILES = {".txt", ".jsonl", ".parquet", *PACKED}


def text_kind(source: str) -> str:
    """How the bytes of a text file are read: `.jsonl` of a.jsonl and of a.jsonl.gz."""
    path = Path(source)
    return (Path(path.stem).suffix if path.suffix in PACKED else "") or path.suffix


class Text(Section):
    """Where text comes from."""

    source: str = Field(description=".txt, .jsonl or .parquet file (also .xz, .gz), or a hub dataset id")
    split: str | None = Field(None, description="split of a hub dataset; train when left out")
    config: str | None = Field(None, description="configuration of a hub dataset that has several")
    revision: str | None = Field(None, description="branch, tag or commit of a hub dataset")
    stream: bool = Field(False, description="read a hub dataset over the network, without a copy of it on disk")
    column: str | None = Field(
        None,
        description="column of .jsonl, .parquet and hub datasets with text, or with chats (lists of {role, content}), "
        "for which the tokenizer has a template; null takes `text`, else `messages`",
    )
    max_mb: PositiveFloat = Field(
        64.0, description="million characters of a longer text that are read, from its start; windows come from them"
    )

    @model_validator(mode="after")
    def _without_effect(self) -> Text:
        lines = []
        if Path(self.source).suffix in TEXT_FILES:
            why = f"is for hub datasets, and {self.source} is a file: leave it out"
            given = [key for key in ("split", "config", "revision", "stream") if getattr(self, key)]
            lines = [problem((key,), why) for key in given]
        if self.column and text_kind(self.source) == ".txt":
            lines.append(problem(("column",), f"{self.source} is plain text, which has none: leave it out"))
        if lines:
            raise problems("Text", lines)
        return self


class CalibrationText(Text):
    """Windows drawn from the calibration text."""

    sequences: int = Field(128, gt=0, description="number of windows")
    length: int = Field(512, gt=1, description="tokens in a window")
    seed: int = Field(0, ge=0, description="which windows are drawn")


class EvaluationText(Text):
    """Windows the gate judges on; never text that was calibrated or trained on."""

    sequences: int | None = Field(None, gt=0, description="number of windows; null takes all")
    length: int = Field(1024, gt=1, description="tokens in a window")
    seed: int | None = Field(None, ge=0, description="which windows are drawn; null takes the first ones")


class Data(Section):
    """Three texts. Training text is cut into windows of train.length."""

    calibration: CalibrationText
    training: Text | None = Field(None, description="needed when there is a train section")
    evaluation: EvaluationText | None = Field(None, description="needed when there is a gate section")
    decontaminate: int | None = Field(
        13,
        gt=0,
        description="words in a row that calibration and training text may not share with evaluation text and tasks; "
        "such passages are cut out; null: nothing is compared",
    )

    @model_validator(mode="after")
    def _held_out(self) -> Data:
        held = self.evaluation
        for part, text in (("calibration", self.calibration), ("training", self.training)):
            same = ("source", "config", "split", "column")
            if held and text and all(getattr(held, key) == getattr(text, key) for key in same):
                why = f"{held.source} is also the {part} text; judge on held-out text"
                raise problems("Data", [problem(("evaluation", "source"), why)])
        return self


# where the answers to the questions of a calibrate section are
ANSWERS = {q: f"calibrate.{q}" for q in ("transform", "range", "round")} | {"inputs": "calibrate.range"}
choose_inputs = partial(choose, "calibrate.range", kind="InputOptions")


class Calibrate(Section):
    """Independent questions, each answered by a file."""

    transform: Annotated[Choice, BeforeValidator(partial(choose, "calibrate.transform"))] = Field(
        "none", validate_default=True, description="what is rescaled before rounding: a file of calibrate/transform"
    )
    range: Annotated[Choice, BeforeValidator(partial(choose, "calibrate.range"))] = Field(
        "activation", validate_default=True, description="which scale and zero point: a file of calibrate/range"
    )
    round: Annotated[Choice, BeforeValidator(partial(choose, "calibrate.round"))] = Field(
        "nearest", validate_default=True, description="which code: a file of calibrate/round"
    )
    inputs: Annotated[Choice, BeforeValidator(choose_inputs)] = Field(
        "max",
        validate_default=True,
        description="static activation and KV-cache scales: a file of calibrate/range",
    )


Tracker = Literal["tensorboard", "wandb", "mlflow", "trackio", "comet_ml", "clearml", "aim", "dvclive", "swanlab"]
LOSSES = ("kl", "ce", "hidden")


def not_compiled(learn: Iterable[str]) -> list[str]:
    """Those of the learnables whose blocks torch.compile would compile again and again."""
    return [kind for kind in learn if plugins.stated("qat.learn", kind, "COMPILES") is False]


class Train(Section):
    """The compensation that is learned with the codes frozen."""

    learn: dict[str, SerializeAsAny[Section]] = Field(
        {"bias": {}, "scale": {}},
        validate_default=True,
        description="what is learned: files of qat/learn, by name, or with a rate, or {rate: ..., option: ...}; "
        "null takes one out",
    )
    loss: dict[Literal["kl", "ce", "hidden"], PositiveFloat] = Field(
        {"kl": 1.0},
        description="name, or name and weight, of kl: forward KL to the parent's logits; ce: next token; hidden: "
        "relative squared error of the last hidden state",
    )
    temperature: PositiveFloat = Field(1.0, description="divides both logits in kl")
    teacher: Literal["resident", "hidden"] | Annotated[int, Field(gt=0)] = Field(
        "resident",
        description="resident: the parent in memory; hidden: its last hidden states on disk; K: its K likeliest tokens "
        "on disk (the rest counts as one: a lower bound of kl)",
    )
    student: Literal["dequantized", "packed"] = Field(
        "dequantized",
        description="packed: frozen weights in memory as codes, dequantized in every pass; the same numbers, 4 bits a "
        "weight instead of 16 (24 with scales); not where codes or zero points are learned",
    )
    steps: int = Field(200, gt=0, description="optimizer steps")
    batch: int = Field(8, gt=0, description="sequences in a step, over all ranks")
    micro_batch: int | None = Field(None, gt=0, description="sequences at once on a device; null takes batch")
    length: int = Field(512, gt=1, description="tokens in a sequence")
    warmup: int = Field(
        default_factory=lambda before: min(10, before["steps"] // 10),
        ge=0,
        description="steps of rising learning rate; 10, or a tenth of fewer than 100 steps, when left out",
    )
    enough: PositiveFloat | None = Field(
        None, description="KL on held-out windows of the training text at which there is nothing left to recover"
    )
    validate_every: int | None = Field(
        None, gt=0, description="steps between validations, the best of which is kept; null: before and after only"
    )
    patience: int | None = Field(None, gt=0, description="validations that are no better, after which training ends")
    checkpoint: Literal["auto"] | Annotated[int, Field(ge=0)] = Field(
        "auto", description="blocks whose forward pass is repeated in backward; auto: as many as memory asks for"
    )
    cuda_graph: Literal["auto"] | bool = Field(
        "auto", description="capture the step in a CUDA graph; auto: on a CUDA device, but for mixtures of experts"
    )
    compile: Literal["auto"] | bool = Field(
        "auto",
        description="torch.compile what lies between linears; auto: with a CUDA graph, where training takes minutes",
    )
    save_every: int = Field(50, gt=0, description="steps between checkpoints")
    seed: int = Field(0, ge=0, description="order of the sequences")
    trackers: Annotated[list[Tracker], OneOrMore] = Field(
        [], description="where loss and KL are sent while training; files go to trackers/ in the run's folder"
    )

    @field_validator("learn", mode="before")
    @classmethod
    def _read_learn(cls, value: Any) -> Any:
        value = [value] if isinstance(value, str) else value
        is_names = isinstance(value, list) and all(isinstance(key, str) for key in value)
        value = {key: {} for key in value} if is_names else value
        if not isinstance(value, dict):
            return value
        found, lines = {}, []
        for name, given in value.items():
            if name not in plugins.names("qat.learn"):
                lines.append(problem((name,), "unknown key" + did_you_mean(name, plugins.names("qat.learn"))))
                continue
            if given is None:  # `scale: null` learns no scale
                continue
            short = not isinstance(given, Mapping | Section)
            try:
                found[name] = plugins.options("qat.learn", name).model_validate({"rate": given} if short else given)
            except ValidationError as error:
                lines += [
                    problem((name, *(() if short else e["loc"])), e["msg"], e["input"], e["type"])
                    for e in error.errors()
                ]
        if lines:
            raise problems("learn", lines)
        if not found:
            raise ValueError("nothing is learned; name one of qat/learn, or set train to null")
        return found

    @field_validator("loss", mode="before")
    @classmethod
    def _read_loss(cls, value: Any) -> Any:
        value = {value: 1.0} if isinstance(value, str) else value
        if not isinstance(value, dict):
            raise ValueError(f"is one of {', '.join(LOSSES)}, or a mapping of them to weights, not {value!r}")
        unknown = [key for key in value if key not in LOSSES]
        if unknown:
            raise problems("loss", [problem((key,), "unknown key" + did_you_mean(key, LOSSES)) for key in unknown])
        found = {key: weight for key, weight in value.items() if weight is not None}
        if not found:
            raise ValueError(f"there is no loss; name one or more of {', '.join(LOSSES)}")
        return found

    @model_validator(mode="after")
    def _check(self) -> Train:
        lines = []
        if self.micro_batch and self.batch % self.micro_batch:
            lines.append(problem(("micro_batch",), f"{self.micro_batch} does not divide batch, which is {self.batch}"))
        if self.warmup >= self.steps:
            why = f"{self.warmup} leaves no step at the full rate, steps is {self.steps}; leave warmup out or lower it"
            lines.append(problem(("warmup",), why))
        if self.temperature != 1 and "kl" not in self.loss:
            lines.append(problem(("temperature",), "goes with the loss kl, which is not asked for"))
        if isinstance(self.teacher, int) and "hidden" in self.loss:
            why = f"{self.teacher} keeps likely tokens only, but the loss hidden needs states: take resident or hidden"
            lines.append(problem(("teacher",), why))
        moved = [kind for kind in self.learn if plugins.stated("qat.learn", kind, "PART") in ("zero", "codes")]
        if self.student == "packed" and moved:
            why = f"packed keeps codes and zero points as they are, but {' and '.join(moved)} learns them"
            lines.append(problem(("student",), f"{why}: take dequantized"))
        if self.patience and not self.validate_every:
            lines.append(problem(("patience",), "counts validations: set validate_every too"))
        if self.compile is True and (apart := not_compiled(self.learn)):
            why = f"is true, but learn has {' and '.join(apart)}: set it to auto or false"
            lines.append(problem(("compile",), why))
        if self.validate_every and self.validate_every > self.steps:
            lines.append(
                problem(("validate_every",), f"{self.validate_every} is more than steps, which is {self.steps}")
            )
        if lines:
            raise problems("Train", lines)
        return self


class Export(Section):
    """What is written, and for whom."""

    formats: Annotated[list[str], OneOrMore] = Field(
        ["compressed_tensors"], min_length=1, validate_default=True, description="files of export/formats"
    )
    engines: Annotated[list[str], OneOrMore] = Field(
        ["vllm"], min_length=1, validate_default=True, description="files of export/engines that must load the result"
    )
    shard_gb: PositiveFloat = Field(5.0, description="size of the largest weight file")

    @field_validator("formats", "engines")
    @classmethod
    def _known(cls, value: list[str], info: ValidationInfo) -> list[str]:
        lines = []
        for index, name in enumerate(value):
            try:
                plugins.check(f"export.{info.field_name}", name)
            except ValueError as error:
                lines.append(problem((index,), str(error)))
        if lines:
            raise problems("Export", lines)
        if len(set(value)) < len(value):
            raise ValueError(f"each only once, got {', '.join(value)}")
        return value


class Compute(Section):
    """Where Tare itself computes; apart from the serving dtype."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one")
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: float32 on a CPU")
    activation_gb: PositiveFloat = Field(
        4.0, description="host memory for the hidden states of calibration; more of them go to disk"
    )
