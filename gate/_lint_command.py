"""`tare lint`: the lint of any checkpoint directory, for a person."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from gate import lint
from qat import plugins, report


def main(directory: Path, engines: Sequence[str], tp: int, headers_only: bool) -> int:
    """Say the faults, headers first; gives the exit code: 0 none, 1 some, 2 for an engine that is not known.

    With TARE_LOG=json every fault is an event of its own, {kind, where, what, rule, way_out, text}.
    """
    for engine in engines:
        try:
            plugins.check("export.engines", engine)
        except ValueError as error:
            report.complain(f"--engine {engine}: {error}")
            return 2
    start = time.perf_counter()

    def good() -> None:
        seconds = time.perf_counter() - start
        where = f"{', '.join(engines)}, {report.plural(tp, 'rank')}"
        report.say(f"{directory}: configs and headers are good for {where} ({seconds:.1f} s)")

    found = lint.check(directory, engines, tp=tp, values=not headers_only, headers_are_good=good)
    faults = [fault for fault in found if not lint.is_note(fault)]
    for line in lint.report([fault for fault in found if lint.is_note(fault)], at_most=5):
        report.say(f"note: {line}")
    if not faults and not headers_only:
        report.say(f"{directory}: so are the values ({time.perf_counter() - start:.1f} s)")
    if report.log_format() == "json":
        for fault in faults:
            report.event("fault", fault.as_dict())
    else:
        for line in lint.report(faults):
            print(line)
    return 1 if faults else 0
