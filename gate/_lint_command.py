"""`tare lint`: the lint of any checkpoint directory, for a person."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gate import lint
from qat import plugins
from qat.report import plural


def main(directory: Path, engines: Sequence[str], tp: int, headers_only: bool) -> int:
    """Print faults, headers first; gives the exit code: 0 none, 1 some, 2 for an engine that is not known."""
    for engine in engines:
        try:
            plugins.check("export.engines", engine)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    start = time.perf_counter()

    def good() -> None:
        seconds = time.perf_counter() - start
        where = f"{', '.join(engines)}, {plural(tp, 'rank')}"
        print(f"{directory}: configs and headers are good for {where} ({seconds:.1f} s)")

    found = lint.check(directory, engines, tp=tp, values=not headers_only, headers_are_good=good)
    faults = [fault for fault in found if not lint.is_note(fault)]
    for line in lint.report([fault for fault in found if lint.is_note(fault)], at_most=5):
        print(f"note: {line}")
    if not faults and not headers_only:
        print(f"{directory}: so are the values ({time.perf_counter() - start:.1f} s)")
    for line in lint.report(faults):
        print(line)
    return 1 if faults else 0
