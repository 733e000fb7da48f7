"""A verdict for machines: JUnit XML, which every CI service shows, and Markdown for a pull request."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gate.stage._verdict import problems
from gate.stage.table import COLUMNS, cell
from qat.report import plain, xml

MARKS = {"released": "✅", "refused": "❌", "anomalous": "⚠️", "inconclusive": "❔"}


def write(folder: Path, title: str, verdict: Mapping[str, Any]) -> None:
    """Write junit.xml and summary.md into `folder`. verdict: what verdict.json holds."""
    (folder / "junit.xml").write_text(junit(title, verdict), encoding="utf-8")
    (folder / "summary.md").write_text(markdown(title, verdict), encoding="utf-8")


def junit(title: str, verdict: Mapping[str, Any]) -> str:
    """One suite an export, one case a check. Refused is a failure; anomalous and inconclusive are errors."""
    root = ElementTree.Element("testsuites", name=title)
    for name, export in verdict["exports"].items():
        suite = ElementTree.SubElement(root, "testsuite", name=name)
        cases: list[tuple[str, str | None, str]] = [
            (f"fault: {fault['where']}", "failure", fault["text"]) for fault in export["faults"]
        ]
        cases += [("believable", "error", text) for text in export["anomalies"]]
        kinds = {"passed": None, "failed": "failure", "undecided": "error"}
        cases += [(check["name"], kinds[check["outcome"]], check["text"]) for check in export["checks"]]
        if not cases:
            cases = [("readable", None, "no fault was found, and no bound was given")]
        for case, kind, text in cases:
            made = ElementTree.SubElement(suite, "testcase", classname=f"{title}.{name}", name=case)
            inner = ElementTree.SubElement(made, kind or "system-out")
            inner.text = text
            if kind:
                inner.set("message", text)
        counts = {f"{kind}s": sum(case[1] == kind for case in cases) for kind in ("failure", "error")}
        for key, count in {"tests": len(cases), **counts}.items():
            suite.set(key, str(count))
    for key in ("tests", "failures", "errors"):
        root.set(key, str(sum(int(suite.get(key, 0)) for suite in root)))
    return xml(root)


def markdown(title: str, verdict: Mapping[str, Any]) -> str:
    """The table and what stands in the way, short enough for a comment."""
    status = verdict["status"]
    lines = [f"## {MARKS[status]} {plain(title)}: {status}", ""]
    keys = [(key, heading, spec) for key, heading, spec in COLUMNS if key != "note"]
    rows = [{**row, "megabytes": row["size_on_disk"] and row["size_on_disk"] / 1e6} for row in verdict["table"]]
    used = [column for column in keys if any(row[column[0]] not in (None, "") for row in rows)]
    lines.append("| " + " | ".join(heading for _, heading, _ in used) + " |")
    lines.append("|" + "|".join("---" if spec == "" else "---:" for _, _, spec in used) + "|")
    lines += ["| " + " | ".join(plain(cell(row[key], spec)) for key, _, spec in used) + " |" for row in rows]
    lines.append("")
    released = [name for name, export in verdict["exports"].items() if export["released"]]
    if released:
        lines.append("Released: " + ", ".join(f"`{name}`" for name in released))
    lines += [f"- **{kind}** `{name}`: {plain(text)}" for kind, name, text in problems(verdict)]
    text = verdict["evaluation"]
    where = f"{text['num_windows']} windows of {text['length']} tokens, {text['dtype']} on {text['device']}"
    lines += ["", f"Measured on {where}; intervals at {100 * verdict['statistics']['confidence']:.4g}% confidence."]
    return "\n".join(lines) + "\n"
