"""What a run without a verdict leaves for pipelines, in the place of what an earlier run of its folder left."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from qat import arguments, manifest, report, summary
from qat.arguments import RecipeError
from qat.report import plain, xml

MARKS, CASES = {"failed": "❌", "ungated": "❔"}, {"failed": "error", "ungated": "skipped"}
NO_GATE = "the recipe has no gate: nothing was judged, and nothing is released"


def forget(folder: Path) -> None:
    """Remove what an earlier run left; a full disk does not stand in the way of that."""
    for name in ("verdict.json", "report.html", "report.json", "summary.md", "junit.xml"):
        (folder / name).unlink(missing_ok=True)


def write(folder: Path, title: str, status: str, text: str) -> None:
    """summary.md with one line, and junit.xml with one test case: an error of a run that failed, else skipped."""
    line = f"## {MARKS[status]} {plain(title)}: {status}\n\n{plain(text)}\n"
    (folder / "summary.md").write_text(line, encoding="utf-8")
    kind = CASES[status]
    counts = {"tests": "1", "failures": "0", "errors": str(int(kind == "error"))}
    root = ElementTree.Element("testsuites", {"name": title, **counts})
    suite = ElementTree.SubElement(root, "testsuite", {"name": "run", **counts})
    case = ElementTree.SubElement(suite, "testcase", classname=title, name=status)
    ElementTree.SubElement(case, kind, message=text).text = text
    (folder / "junit.xml").write_text(xml(root), encoding="utf-8")


def disown(argv: list[str], error: str) -> None:
    """Let the folder that a bad command line names say `failed`, not what an earlier run of it came to."""
    try:
        _, values, _ = arguments.read(argv)
    except RecipeError:
        return  # not even the folder can be read from it
    path = Path(str(values.get("output", "runs"))) / str(values.get("name")) / summary.FILE
    if report.is_main() and path.is_file():
        before = summary.last(path.parent)
        nothing: dict[str, Any] = {"exports": {}, "verdict": None, "report": None, "stages": []}
        forget(path.parent)
        manifest.write_json(path, {**before, **nothing, "status": "failed", "error": manifest.redact(error)})
        write(path.parent, str(values["name"]), "failed", manifest.redact(error))
