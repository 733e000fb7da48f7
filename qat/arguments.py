"""From a command line to the mapping a recipe is validated from: strict YAML, `dotted.key=value`, paths.

YAML is read by its 1.2 rules, where PyYAML follows 1.1: `1e-5` is a number, `no` and `12:30` are text, `007` is seven;
and a key given twice is an error.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from qat import plugins
from qat.manifest import redact

KEYWORDS = ("demo", "micro")  # model sources that are no path
LARGEST = 10_000  # values in a recipe
FILE_SUFFIXES = {".gguf", ".txt", ".jsonl", ".parquet", ".xz", ".gz", ".safetensors"}


class RecipeError(ValueError):
    """A mistake in a recipe or command line; its text is the whole message. Exit code 2."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars; a repeated key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == f"{TAG}merge":
                continue
            key, line = self.construct_object(key_node), key_node.start_mark.line + 1
            if key in seen:
                raise yaml.YAMLError(f"{key!r} stands twice, in line {seen[key]} and in line {line}; keep one")
            seen[key] = line
        return super().construct_mapping(node, deep)


def _int(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(str(loader.construct_scalar(node)))  # 007 is seven; PyYAML's own reads octal


TAG = "tag:yaml.org,2002:"
# no dates, no sets, no objects
KNOWN = (None, *(f"{TAG}{kind}" for kind in ("str", "seq", "map", "bool", "float", "null")))
_Loader.yaml_constructors = {tag: yaml.SafeLoader.yaml_constructors[tag] for tag in KNOWN}
_Loader.add_constructor(f"{TAG}int", _int)
_Loader.yaml_implicit_resolvers = {}
for _kind, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(f"{TAG}{_kind}", re.compile(rf"^(?:{_pattern})$"), list(_first))


def read_yaml(text: str) -> Any:
    """The value of a YAML text. Raises RecipeError with the place of a mistake."""
    try:
        value = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, KeyError, RecursionError) as error:  # such as `!!int x`, `!!bool x`, [[[[...
        raise RecipeError("not YAML: " + " ".join(str(error).split())) from error
    _check_extent(value)
    return value


def _check_extent(value: Any) -> None:
    """Aliases may make a short text endless; and every text is one that may be written anywhere."""
    waiting, count = [value], 0
    while waiting:
        inner = waiting.pop()
        count += 1
        if count > LARGEST:
            raise RecipeError(f"more than {LARGEST} values, by its aliases; write it out")
        if isinstance(inner, dict):
            waiting += [*inner.keys(), *inner.values()]
        elif isinstance(inner, list):
            waiting += inner
        elif isinstance(inner, str):
            _check_text(inner)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RecipeError(f"{text!a} is not UTF-8 text") from error
    if (shown := redact(text)) != text:
        raise RecipeError(
            f"{shown!r} holds a token or a password, and a recipe is written into manifests, reports and releases; "
            "leave it out and set HF_TOKEN"
        )


def read(argv: list[str]) -> tuple[Path, dict[str, Any], list[str]]:
    """(recipe file, its values with the overrides in and `name` filled, problems so far).

    Raises RecipeError when there is no one file to read.
    """
    for argument in argv:
        _check_text(argument)
    given = [argument.removeprefix("recipe=") for argument in argv if argument.startswith("recipe=")]
    if len(given) != 1:
        raise RecipeError(f"give one recipe=FILE, got {len(given)}; recipes/ has: {', '.join(_shipped())}")
    file = find_recipe(given[0])
    try:
        values = read_yaml(file.read_text(encoding="utf-8"))
    except (RecipeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{file}: {error}") from error
    if not isinstance(values, dict):
        raise RecipeError(f"{file} holds a {type(values).__name__}, not a mapping of sections (model:, data:, ...)")
    overrides = [argument for argument in argv if not argument.startswith("recipe=")]
    wrong = list(without_effect(overrides))
    for argument in overrides:
        try:
            override(values, argument)
        except RecipeError as error:
            wrong.append(str(error))
    if values.get("name") is None:
        values["name"] = file.stem
    return file, values, wrong + settle_paths(values, file.parent)


def _shipped() -> list[str]:
    return sorted(path.name for path in (plugins.ROOT / "recipes").glob("*.yaml"))


def find_recipe(text: str) -> Path:
    """`text` when that file exists, else recipes/`text` of the repository."""
    path = Path(os.path.expanduser(text))
    for candidate in (path, plugins.ROOT / "recipes" / path):
        if os.path.isfile(candidate):  # unlike Path's, it takes any text
            return candidate
    raise RecipeError(f"recipe={text}: no such file, nor recipes/{text}{_meant(text)}")


def _meant(text: str) -> str:
    """What to add to an error about a recipe that is not there; names are compared without their ending."""
    stems = {Path(name).stem: name for name in _shipped()}
    near = difflib.get_close_matches(Path(text).stem, stems, n=1)
    return (f", did you mean {stems[near[0]]!r}?" if near else "") + f" (known: {', '.join(stems.values())})"


def without_effect(overrides: list[str]) -> Iterator[str]:
    """Problems: a key that a later argument sets again, itself or as a part of a whole section."""
    keys = [argument.partition("=")[0] for argument in overrides]
    for place, key in enumerate(keys):
        later = next((b for b in range(place + 1, len(keys)) if f"{key}.".startswith(f"{keys[b]}.")), None)
        if later is not None:
            yield f"{overrides[place]} has no effect, as {overrides[later]} comes after it; give one of them"


def override(values: dict[str, Any], argument: str) -> None:
    """Put `dotted.key=value` into `values`; the value is read as YAML. Raises RecipeError."""
    path, sign, text = argument.partition("=")
    keys = path.split(".")
    if not sign or not all(keys) or argument.startswith("-"):
        raise RecipeError(f"{argument}: not of the form dotted.key=value, such as train.steps=50")
    try:
        value = read_yaml(text)
    except RecipeError as error:
        raise RecipeError(f"{argument}: {error}") from error
    where: Any = values
    for depth, key in enumerate(keys[:-1], 1):
        where = where[int(key)] if isinstance(where, list) else where.setdefault(key, {})
        if isinstance(where, list) and where:  # such as train.0.steps
            if keys[depth].isdecimal() and int(keys[depth]) < len(where):
                continue
            outer = ".".join(keys[:depth])
            raise RecipeError(f"{path}: {outer} is a list; its items are {outer}.0 to {outer}.{len(where) - 1}")
        if isinstance(where, dict) and keys[depth - 1] == "train" and keys[depth].isdecimal():
            outer, rest = ".".join(keys[:depth]), ".".join(keys[depth + 1 :])
            raise RecipeError(
                f"{path}: {outer} is one section, not a list; set "
                + (f"{outer}.{rest}={text}" if rest else f"{outer}={text}, or {outer}='[...]' for several stages")
            )
        if not isinstance(where, dict):
            outer, rest = ".".join(keys[:depth]), ": {".join(keys[depth:])
            word = "rate" if isinstance(where, int | float) else "name"  # what the short form stands for
            is_bare = where is None or isinstance(where, list) or keys[depth - 1] == "learn"  # `learn: zero` is a key
            beside = "" if is_bare else f"{word}: {where}, "
            raise RecipeError(
                f"{path}: {outer} is {'null' if where is None else repr(where)}, which has no keys; give it whole: "
                f"{outer}='{{{beside}{rest}: {text}{'}' * (len(keys) - depth)}'"
            )
    where[int(keys[-1]) if isinstance(where, list) else keys[-1]] = value


def settle_paths(values: dict[str, Any], recipe_folder: Path) -> list[str]:
    """Rewrite relative paths of model and texts so that they hold from here; return what is missing."""
    data = values.get("data")
    parts = data if isinstance(data, dict) else {}
    sections = {"model": values.get("model"), **{f"data.{name}": part for name, part in parts.items()}}
    wrong = []
    for where, section in sections.items():
        source = section.get("source") if isinstance(section, dict) else None
        if isinstance(source, str) and not (where == "model" and source in KEYWORDS):
            found = locate(source, recipe_folder)
            if found is not None:
                section["source"] = found
            elif source.startswith(("/", ".", "~")) or source.count("/") > 1 or Path(source).suffix in FILE_SUFFIXES:
                wrong.append(
                    f"{where}.source: {source} does not exist, neither here, in the repository nor beside the recipe; "
                    f"set {where}.source=PATH"
                )
    return wrong + _settle_tasks(values, recipe_folder)


def _settle_tasks(values: dict[str, Any], recipe_folder: Path) -> list[str]:
    """The same for the example files of gate.tasks."""
    gate = values.get("gate")
    tasks = gate.get("tasks") if isinstance(gate, dict) else None
    offline = tasks.get("offline") if isinstance(tasks, dict) else None
    wrong: list[str] = []
    if not isinstance(offline, dict):
        return wrong
    for name, source in offline.items():
        found = locate(source, recipe_folder) if isinstance(source, str) else None
        if found is not None:
            offline[name] = found
        elif isinstance(source, str):
            nowhere = "does not exist, neither here, in the repository nor beside the recipe"
            wrong.append(f"gate.tasks.offline.{name}: {source} {nowhere}")
    return wrong


def locate(source: str, recipe_folder: Path) -> str | None:
    """Where the file or folder `source` is, seen from the current directory, or None when it is nowhere.

    Looked for in the current directory, then in the repository, then beside the recipe.
    """
    path = Path(os.path.expanduser(source))
    if os.path.exists(path):
        return str(path)
    for folder in (plugins.ROOT, recipe_folder):
        if not path.is_absolute() and os.path.exists(folder / path):
            return os.path.relpath(folder / path)
    return None
