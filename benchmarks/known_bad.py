"""The table of known-bad inputs: what was tried, who caught it, what was said, and what rivals do with the same files.

    python benchmarks/known_bad.py [llmc=ENV/bin/python] [modelopt=ENV/bin/python]
        [table=benchmarks/known_bad.md] [out=benchmarks/results/known_bad.json] [work=FOLDER]

Runs tests/known_bad and the tests that tests/known_bad/elsewhere.py names; what each of them reports is a row.
Rivals get the files that test_load.py, test_data.py and test_calibrate.py spoil, byte for byte, in environments of
requirements/llm-compressor.txt and requirements/modelopt.txt. Left out, a column stays as it is in `out`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:1] = [str(ROOT), str(ROOT / "benchmarks")]

from _options import read

from tests.known_bad import elsewhere, test_calibrate, test_data, test_load
from tests.known_bad.case import Case, Place

DEFAULTS = {
    "llmc": "", "modelopt": "", "work": "",
    "table": str(ROOT / "benchmarks/known_bad.md"), "out": str(ROOT / "benchmarks/results/known_bad.json"),
}  # fmt: skip
RIVALS = {"llmc": "llm-compressor", "modelopt": "model-optimizer"}
UNDERSTOOD = ("data.calibration.source", "scheme.weights.group_size", "model.dtype")
OURS = ("train", "calibrate.round", "calibrate.transform", "until", "export.formats")  # do not change what a rival does
EXTRA = {  # faults outside the model: what the rival's job is told
    "disk full while the export is written": {"file_bytes": 100_000},
    "a read-only run folder": {"read_only": True},
}


def main(argv: list[str]) -> None:
    options = read(argv, DEFAULTS)
    with tempfile.TemporaryDirectory(dir=options["work"] or None) as folder:
        rows = tested(Path(folder))
        out = Path(options["out"])
        before = json.loads(out.read_text(encoding="utf-8"))["rows"] if out.is_file() else []
        for key, tool in RIVALS.items():
            if options[key]:
                found = rival(tool, options[key], Path(folder) / tool)
            else:
                found = {row["fault"]: row[tool] for row in before if row.get(tool)}
            for row in rows:
                row[tool] = found.get(row["fault"])
    out.parent.mkdir(parents=True, exist_ok=True)
    said = {"rivals": versions(options, out), "rows": rows}
    out.write_text(json.dumps(said, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    Path(options["table"]).write_text(table(said), encoding="utf-8")
    print(summary(rows))


def tested(work: Path) -> list[dict[str, Any]]:
    """A row for every fault, from what the tests report."""
    report = work / "junit.xml"
    nodes = sorted({line.test for line in elsewhere.LINES})
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "-o",
               "junit_family=xunit1", "tests/known_bad", *nodes]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if not report.is_file():
        raise SystemExit(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    rows, passed = [], {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('file')}::{case.get('name')}"
        passed[name] = all(case.find(kind) is None for kind in ("failure", "error", "skipped"))
        said = {p.get("name"): p.get("value") for p in case.iter("property")}
        if "fault" in said:
            rows.append({**said, "refused": said["refused"] == "True", "test": name, "passed": passed[name]})
    for line in elsewhere.LINES:
        fine = [ok for name, ok in passed.items() if name == line.test or name.startswith(f"{line.test}[")]
        rows.append(
            {"fault": line.fault, "caught_by": line.caught_by, "said": line.said, "test": line.test,
             "refused": line.refused, "passed": bool(fine) and all(fine)}
        )  # fmt: skip
    order = ("recipe", "plan", "load", "data", "calibrate", "train", "export", "lint", "gate", "run")
    return sorted(rows, key=lambda row: order.index(row["caught_by"]))


def rival(tool: str, python: str, work: Path) -> dict[str, dict[str, str]]:
    """fault -> {outcome, said} of one rival."""
    work.mkdir()
    cases: list[Case] = [*test_load.CASES, *test_data.CASES, *test_calibrate.CASES]
    jobs = [job for number, case in enumerate(cases) if (job := prepared(tool, case, work / f"{number:03d}"))]
    for number, (fault, more) in enumerate(EXTRA.items()):
        job = prepared(tool, Case(fault, "run", lambda place: None), work / f"extra{number}")
        assert job is not None
        jobs.append(job | more)
    (work / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    command = [python, str(ROOT / "benchmarks/known_bad_rivals.py"), tool, str(work / "jobs.json")]
    subprocess.run(command, env=environment, check=True, cwd=work)
    found = {}
    for job in jobs:
        said = json.loads(Path(job["result"]).read_text(encoding="utf-8"))
        text = said["said"].replace(f"{Path(job['model']).parent}/", "").replace(str(work), "FOLDER")
        text = " ".join(re.sub(r"\b\d{12,}\b", "N", text).split())
        found[job["fault"]] = {"outcome": said["outcome"], "said": text}
    return found


def prepared(tool: str, case: Case, folder: Path) -> dict[str, Any] | None:
    """The job of a case: its model and text as the test spoils them. None when the fault is Tare's own command line."""
    folder.mkdir()
    place = Place.new(folder)
    more = dict(str(argument).split("=", 1) for argument in case.spoil(place) or ())
    if set(more) - {*UNDERSTOOD, *OURS}:
        shutil.rmtree(folder)
        return None
    size = more.get("scheme.weights.group_size", "32")
    return {
        "tool": tool,
        "fault": case.fault,
        "model": str(place.model),
        "text": more.get("data.calibration.source", str(place.text("calibration"))),
        "group_size": None if size == "null" else int(size),
        "dtype": more.get("model.dtype", "bfloat16"),
        "out": str(folder / "out"),
        "cache": str(folder / "cache"),
        "log": str(folder / "log"),
        "result": str(folder / "result.json"),
    }


def versions(options: dict[str, str], out: Path) -> dict[str, str]:
    """The rivals' versions: of their environments, or as they were when they ran last."""
    found = json.loads(out.read_text(encoding="utf-8"))["rivals"] if out.is_file() else {}
    for key, package in (("llmc", "llmcompressor"), ("modelopt", "nvidia-modelopt")):
        if options[key]:
            ask = "import importlib.metadata as m, sys; print(' / '.join(f'{p} {m.version(p)}' for p in sys.argv[1:]))"
            command = [options[key], "-c", ask, package, "transformers", "torch"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[RIVALS[key]] = done.stdout.strip()
    return found


def summary(rows: list[dict[str, Any]]) -> str:
    count = Counter(row["caught_by"] for row in rows)
    lines = [f"{len(rows)} faults, {sum(row['passed'] for row in rows)} tests pass: "]
    lines[0] += ", ".join(f"{name} {number}" for name, number in count.items())
    for tool in RIVALS.values():
        given = [row for row in rows if row[tool]]
        refused = [row for row in given if row["refused"]]
        through = sum(row[tool]["outcome"] == "finished" for row in refused)
        if given:
            lines.append(
                f"{tool}: {len(given)} of these inputs; of the {len(refused)} that Tare refuses it finishes {through}, "
                f"and ends with an error in {len(refused) - through}"
            )
    return "\n".join(lines)


def table(said: dict[str, Any]) -> str:
    rows = said["rows"]
    lines = [
        "# Known-bad inputs",
        "",
        "Made by `python benchmarks/known_bad.py`; do not edit. What Tare says is copied from the runs of the tests;",
        "these check as well that nothing half-written is left and that an earlier run's results are the same bytes.",
        "A rival's cell is what it did with the same files: INT4 in groups of 32, GPTQ by llm-compressor, AWQ by",
        "Model-Optimizer, loaded by transformers as in their examples; empty where it has no such input. A warning is",
        "transformers' own, in the log.",
        "",
        *[f"- {tool}: {version}" for tool, version in said["rivals"].items()],
        "",
        *summary(rows).splitlines(),
        "",
        "| fault | caught by | what Tare does | " + " | ".join(RIVALS.values()) + " |",
        "|---|---|---|" + "---|" * len(RIVALS),
    ]
    for row in rows:
        cells = [row["fault"], row["caught_by"], row["said"] if row["passed"] else f"**the test fails** {row['said']}"]
        for tool in RIVALS.values():
            found = row[tool]
            cells.append(
                "" if not found else found["said"] if found["outcome"] != "error" else f"error: {found['said']}"
            )
        lines.append("| " + " | ".join(cell.replace("|", "\\|")[:420] for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
