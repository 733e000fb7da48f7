"""The `tare` command, for people. `accelerate launch qat/train.py` is the same run for launchers."""

from __future__ import annotations

import json
import os
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from qat import __version__

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Quantize a model to INT4 or FP8, learn back what rounding cost, release it only when it is good enough.",
)
DEVICES, DTYPES = ("auto", "cpu", "cuda"), ("auto", "float32", "bfloat16")
Arguments = Annotated[
    list[str], typer.Argument(metavar="recipe=FILE [dotted.key=value ...]", help="a recipe, and what differs from it")
]


class RecipeCommand(TyperCommand):
    """A command whose help ends with every key of a recipe."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from qat.recipe import Recipe

        formatter.write("\nKeys of a recipe, with their defaults:\n")
        formatter.write_dl(list(_keys(Recipe)), col_max=34)
        formatter.write(
            "\nExit codes: 0 released or ungated, 1 failed, 2 recipe or usage, 3 the gate said no, 4 inconclusive,"
            "\n130 stopped by Ctrl-C, 143 by SIGTERM\n"
        )


def _keys(section: Any, path: str = "", listed: dict[Any, str] | None = None) -> Iterator[tuple[str, str]]:
    """(dotted key, what it is and its default) for every field below a section.

    listed: sections with the place where their keys stand; defaults of one place would mislead in another.
    """
    from pydantic_core import PydanticUndefined

    from qat.scheme import Section

    listed = {} if listed is None else listed
    for name, field in section.model_fields.items():
        inner = [t for t in _types(field.annotation) if isinstance(t, type) and issubclass(t, Section)]
        nested = [t for t in inner if t.__name__ not in ("Choice", "Section")]
        if nested and nested[0] in listed:
            yield f"{path}{name}", f"{field.description}; keys as in {listed[nested[0]]}"
            continue
        if nested:
            listed[nested[0]] = f"{path}{name}"
            if field.description:
                yield f"{path}{name}", field.description
            yield from _keys(nested[0], f"{path}{name}.", listed)
            continue
        default = "" if field.default is PydanticUndefined else f" [{json.dumps(field.default, default=dict)}]"
        yield f"{path}{name}", f"{field.description}{default}"
        if name == "gate":
            yield from _checks()


def _checks() -> Iterator[tuple[str, str]]:
    """(dotted key, what it is and the names of its options) for every file of gate/."""
    from qat import plugins

    for name in plugins.names("gate"):
        options = ", ".join(plugins.options("gate", name).model_fields)
        yield f"gate.{name}", plugins.summary("gate", name) + (f" Options: {options}" if options else "")


def _types(annotation: Any) -> list[Any]:
    """The type itself, or the members of a union; not what a list or dict holds."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return list(typing.get_args(annotation)) if is_union else [annotation]


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"tare {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="version")] = False,
) -> None:
    pass


NoProgress = Annotated[bool, typer.Option("--no-progress", help="no progress lines; also TARE_PROGRESS=0")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="errors only; also TARE_LOG=quiet")]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON object a line; also TARE_LOG=json")]


def _speak(no_progress: bool, quiet: bool, as_json: bool) -> None:
    if quiet and as_json:
        raise typer.BadParameter("--quiet and --json exclude each other")
    if no_progress or quiet:
        os.environ["TARE_PROGRESS"] = "0"
    if quiet or as_json:
        os.environ["TARE_LOG"] = "quiet" if quiet else "json"
    from qat import report

    try:
        report.log_format()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@app.command(cls=RecipeCommand)
def run(arguments: Arguments, no_progress: NoProgress = False, quiet: Quiet = False, as_json: AsJson = False) -> None:
    """Run every stage of a recipe; what is finished is reused."""
    from qat.train import main

    _speak(no_progress, quiet, as_json)
    raise typer.Exit(main(arguments))


@app.command(cls=RecipeCommand)
def plan(arguments: Arguments) -> None:
    """Print the resolved recipe, the stages to run and to reuse, and what they need. Loads no torch."""
    from qat import plan, report
    from qat.recipe import RecipeError

    try:
        raise typer.Exit(plan.main(arguments))
    except (ValueError, OSError) as error:
        report.complain(str(error))
        raise typer.Exit(2 if isinstance(error, RecipeError) else 1) from None


@app.command(cls=RecipeCommand)
def sensitivity(arguments: Arguments, no_progress: NoProgress = False) -> None:
    """Measure what each group of linears costs; [bits=4.5 [out=FILE]] choose formats within a budget.

    candidates='[{dtype: int8}, skip]' names the formats to choose from beside scheme.weights.
    """
    from qat.mixed import main

    _speak(no_progress, quiet=False, as_json=False)
    raise typer.Exit(main(arguments))


@app.command()
def compare(
    sources: Annotated[list[str], typer.Argument(metavar="RUN_OR_DIR ...", help="folders of runs, or checkpoints")],
    parent: Annotated[str | None, typer.Option(help="as model.source; that of the first run")] = None,
    text: Annotated[str | None, typer.Option(help="held-out text; that of the first run")] = None,
    sequences: Annotated[int | None, typer.Option(min=1, help="windows of text")] = None,
    length: Annotated[int | None, typer.Option(min=2, help="tokens in a window")] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=FILE.jsonl", help="examples to ask all, as gate.tasks.offline; may be repeated"),
    ] = None,
    lm_eval: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="a task of lm-evaluation-harness; may be repeated")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="the first so many examples of each task")] = None,
    out: Annotated[Path, typer.Option(help="folder for compare.html, .json and .csv")] = Path("runs/compare"),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16")] = "auto",
    no_progress: NoProgress = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Measure runs and checkpoints, other tools' too, on the same text against one parent; writes one HTML page."""
    from qat import manifest, report

    _speak(no_progress, quiet, as_json)
    for name, value, known in (("device", device, DEVICES), ("dtype", dtype, DTYPES)):
        if value not in known:
            raise typer.BadParameter(f"--{name} {value}: one of {', '.join(known)}")
    from qat.arguments import RecipeError
    from qat.compare import Choices, main

    try:
        asked = Choices(parent, text, sequences, length, device, dtype, task or (), lm_eval or (), limit)
        main(sources, asked, out)
    except RecipeError as error:
        report.complain(str(error))
        raise typer.Exit(2) from None
    except (ValueError, OSError) as error:
        report.complain(manifest.told(error))
        raise typer.Exit(1) from None


@app.command()
def verify(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR ...", help="a release, a stage or a whole run")],
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Compare every file with the hashes of its manifest, anywhere. Exit code 1: something differs."""
    from qat import verify

    _speak(False, quiet, as_json)
    raise typer.Exit(verify.main(folders))


@app.command()
def push(
    directory: Annotated[Path, typer.Argument(metavar="RELEASE_DIR", help="a released directory")],
    repository: Annotated[str, typer.Argument(metavar="REPO_ID", help="OWNER/NAME of a model on the hub")],
    private: Annotated[bool, typer.Option("--private", help="make it private, if it is not there yet")] = False,
    revision: Annotated[str | None, typer.Option(help="branch, made if it is not there; main when left out")] = None,
    pull_request: Annotated[bool, typer.Option("--pr", help="open a pull request")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list what would go; no network, no token")] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Put a release on the hub, if it is as the gate let it out. The token is HF_TOKEN, or that of `hf auth login`."""
    from qat import manifest, push, report

    _speak(False, quiet, as_json)
    try:
        push.main(directory, push.Target(repository, private, revision, pull_request), dry_run)
    except (ValueError, OSError) as error:
        report.complain(manifest.redact(str(error)))
        raise typer.Exit(1) from None


@app.command()
def lint(
    directory: Annotated[Path, typer.Argument(help="folder of a quantized checkpoint, whoever wrote it")],
    engine: Annotated[
        list[str], typer.Option(help="a file of export/engines, such as vllm or trtllm; may be repeated")
    ],
    tp: Annotated[int, typer.Option(min=1, help="ranks of tensor parallelism")] = 1,
    headers: Annotated[bool, typer.Option("--headers", help="read configs and headers only")] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Say what an engine would reject, misread or drop in a checkpoint. Exit code 1 when there is anything."""
    _speak(False, quiet, as_json)
    if not directory.is_dir():
        raise typer.BadParameter(f"{directory} is no folder; give that of a checkpoint, such as a released FORMAT")
    from gate._lint_command import main

    raise typer.Exit(main(directory, engine, tp, headers))


@app.command()
def engines() -> None:
    """Print how a bias reaches each engine, by architecture and linear, as in the README."""
    from export.engines._table import table

    typer.echo(table(), nl=False)


@app.command(context_settings={"ignore_unknown_options": True})
def serve(
    directory: Annotated[Path, typer.Argument(help="a released directory")],
    arguments: Annotated[list[str] | None, typer.Argument(help="passed on to the engine's server")] = None,
    engine: Annotated[
        str | None, typer.Option(help="one of its serve/*.sh; one that is installed when left out")
    ] = None,
) -> None:
    """Start the installed engine on a released directory, with the options in its serve/."""
    from export.engines._serve_command import main
    from qat import report

    try:
        main(directory, engine, arguments or [])
    except ValueError as error:
        report.complain(str(error))
        raise typer.Exit(1) from None
