"""A file is a plugin: `find("calibrate.range", "mse")` is calibrate/range/mse.py. No registry, no scan at import.

Files that start with `_` are helpers. A plugin's `Options` (a `Section`), `VERSION` and other constants are read
without importing the module, so that a recipe is checked without torch: the class may use names from pydantic, typing
and qat.scheme only, and a constant that `literal` reads is written out, not computed.
"""

from __future__ import annotations

import ast
import importlib
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from qat.scheme import Section, did_you_mean

ROOT = Path(__file__).resolve().parent.parent
LIGHT = {"pydantic", "typing", "qat.scheme", "__future__"}


class NoOptions(Section):
    """The options of a plugin that has none."""


def names(package: str) -> list[str]:
    """The plugins of `package` (a dotted name such as `calibrate.range`), sorted."""
    return sorted(p.stem for p in (ROOT / package.replace(".", "/")).glob("*.py") if not p.stem.startswith("_"))


def check(package: str, name: str) -> None:
    """Raise ValueError, naming the known ones, when `package` has no plugin `name`."""
    known = names(package)
    if name not in known:
        also = {word: one for one in known for word in _also_called(package, one)}
        raise ValueError(f"there is no {package.replace('.', '/')}/{name}.py{did_you_mean(name, known, also)}")


def find(package: str, name: str) -> ModuleType:
    """Import the plugin `name` of `package`. Raises ValueError when there is none."""
    check(package, name)
    return importlib.import_module(f"{package}.{name}")


def options(package: str, name: str, kind: str = "Options") -> type[Section]:
    """The `Options` class of a plugin, or that of another `kind`, read without importing the plugin."""
    return _options(*_file(package, name), f"{package}.{name}", kind)


def literal(package: str, name: str, constant: str) -> Any:
    """A constant of a plugin, such as `HOLDS = {"int4"}`, read without importing the plugin.

    Raises ValueError when the file has none of that name, or one that is not written out.
    """
    found = stated(package, name, constant)
    if found is None:
        path, _ = _file(package, name)
        raise ValueError(f"{path} has no {constant}; every plugin in {package.replace('.', '/')} states it")
    return found


def stated(package: str, name: str, constant: str) -> Any:
    """A constant of a plugin, read as `literal` does; None where the file has none of that name."""
    path, mtime_ns = _file(package, name)
    for node in _parse(path, mtime_ns).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == constant for target in targets):
                try:
                    return ast.literal_eval(node.value)
                except ValueError as error:
                    raise ValueError(
                        f"{constant} in {path} is computed; it is read as text, so write it out"
                    ) from error
    return None


def _also_called(package: str, name: str) -> tuple[str, ...]:
    """What people call a plugin beside its name, for suggestions: `ALSO_CALLED` of its file, if it has that."""
    return stated(package, name, "ALSO_CALLED") or ()


def summary(package: str, name: str) -> str:
    """The first paragraph of a plugin's docstring, as one line."""
    text = ast.get_docstring(_parse(*_file(package, name))) or ""
    return " ".join(text.partition("\n\n")[0].split())


def version(package: str, name: str) -> int:
    """The `VERSION` of a plugin: raised whenever its numbers change, so that cached results are not reused."""
    return int(literal(package, name, "VERSION"))


def _file(package: str, name: str) -> tuple[Path, int]:
    check(package, name)
    path = ROOT / package.replace(".", "/") / f"{name}.py"
    return path, path.stat().st_mtime_ns


@lru_cache(maxsize=64)
def _parse(path: Path, mtime_ns: int) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@lru_cache(maxsize=64)  # one class per file, so that equal options compare equal
def _options(path: Path, mtime_ns: int, module: str, kind: str) -> type[Section]:
    keep: list[ast.stmt] = []
    for node in _parse(path, mtime_ns).body:
        light_import = isinstance(node, ast.ImportFrom) and node.module in LIGHT
        if light_import or (isinstance(node, ast.ClassDef) and node.name == kind):
            keep.append(node)
    space: dict[str, Any] = {"__name__": module}
    exec(compile(ast.Module(keep, []), str(path), "exec", dont_inherit=True), space)
    found: type[Section] = space.get(kind, NoOptions)
    found.model_rebuild(_types_namespace=space)  # names in annotations are looked up here, not in sys.modules
    return found
