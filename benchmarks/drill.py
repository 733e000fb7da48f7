"""The crash drill on the demo: five stages, each killed in the middle, and finished by the same command.

    python benchmarks/drill.py [out=benchmarks/results/drill.json] [work=FOLDER]

One run is undisturbed. Then, for each moment, a copy of its folder without one stage is run, killed there, and run
again; everything it leaves must be byte for byte what the undisturbed one left. tests/test_drill.py does this on
micro.yaml, at each boundary and at moments by chance.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from qat import __version__
from tests.killing import done, drill, finished, leftovers, part_of, results

COMMAND = ["recipe=demo.yaml", "compute.device=cpu"]
# what is killed at, by the end of the path of a file operation; where among those: 0 the first, 1 the last
MOMENTS = {
    "calibrate": ("before", "os.rename", ".safetensors.part", 0.5),
    "train": ("torn", "os.rename", "resume.safetensors.part", 0.6),
    "export": ("torn", "open", "tokenizer.json", 0),
    "gate": ("before", "os.rename", ".json.part", 0.8),
    "release": ("before", "os.link", "model.safetensors", 0.5),
}


def moment(log: list[list[Any]], stage: str) -> tuple[str, list[Any]]:
    """(folder of the stage, moment in it) of the first stage of that kind."""
    how, operation, end, share = MOMENTS[stage]
    folder = next(name for name in finished(log) if name.startswith(f"{stage}-"))
    number = finished(log).index(folder)
    inside = [step for step in log if step[3] == number and step[0] == operation and step[1].endswith(end)]
    event, path, count, _ = inside[round(share * (len(inside) - 1))]
    return folder, [how, event, path, count, 0]


def main(work: Path, out: Path) -> None:
    whole = work / "whole"
    print(f"undisturbed run in {whole}", flush=True)
    assert drill(COMMAND, [(whole, [None])]) == {whole: [0]}
    log, _ = done(whole)
    expected, rows = results(whole / "demo"), []
    for stage in MOMENTS:
        folder, at = moment(log, stage)
        copy = part_of(whole, work / stage, set(finished(log)) - {folder})
        codes = drill(COMMAND, [(copy, [at, None])])[copy]
        found = results(copy / "demo")
        other = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        torn = [name for name in leftovers(copy) if not name.startswith(".")]
        row = {"stage": folder, "killed": at[:3], "exit_codes": codes, "other_bytes": other, "leftovers": torn}
        rows.append({**row, "files": len(found)})
        print(json.dumps(rows[-1]), flush=True)
    said = {"tare": __version__, "command": COMMAND, "points": rows}
    out.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    sys.exit(any(row["other_bytes"] or row["leftovers"] or row["exit_codes"] != [-9, 0] for row in rows))


if __name__ == "__main__":
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    output = Path(given.get("out", "benchmarks/results/drill.json"))
    if "work" in given:
        os.makedirs(given["work"], exist_ok=True)
        main(Path(given["work"]).resolve(), output)
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder), output)
