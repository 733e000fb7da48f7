"""What a person sees while a run goes on. Only rank 0 speaks; TARE_PROGRESS=0 silences progress, not the rest.

On a terminal progress is a bar; elsewhere it is a plain line every ten seconds:

    calibrate  block 7/28  err 0.0031  eta 2m

TARE_LOG=json makes every line a JSON object with `event` (say, stage, error, table, progress), `time` (UTC, ISO 8601)
and `text` or the numbers; TARE_LOG=quiet leaves errors only.
"""

from __future__ import annotations

import json
import os
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from datetime import UTC, datetime
from time import monotonic
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from qat.manifest import redact

PLAIN_WIDTH = 160  # of tables that go to a file
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # what XML 1.0 has no way to write
LINE_EVERY_SECONDS, FIRST_LINE_SECONDS = 10.0, 3.0


def plain(text: str) -> str:
    """Text that Markdown shows as it is."""
    for letter in "\\`*_[]<>|":
        text = text.replace(letter, "\\" + letter)
    return " ".join(text.splitlines())


def plural(number: int, what: str) -> str:
    """`1 passage`, `2,000 passages`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def xml(root: ElementTree.Element) -> str:
    """An indented document, with a replacement character for each that XML cannot hold."""
    ElementTree.indent(root)
    return NOT_XML.sub("\ufffd", ElementTree.tostring(root, encoding="unicode", xml_declaration=True)) + "\n"


def is_main() -> bool:
    """True on the one rank that speaks."""
    return os.environ.get("RANK", "0") == "0"


def console(stderr: bool = False) -> Console:
    """A console for the stream as it is now (tests and notebooks replace it)."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, width=None if stream.isatty() else PLAIN_WIDTH, highlight=False, soft_wrap=True)


def log_format() -> str:
    """`text`, `json` or `quiet`. Raises ValueError for another TARE_LOG."""
    found = os.environ.get("TARE_LOG", "") or "text"
    if found not in ("text", "json", "quiet"):
        raise ValueError(f"TARE_LOG is {found!r}; it may be text, json or quiet")
    return found


def event(kind: str, said: dict[str, Any], stderr: bool = False) -> None:
    """One line of the JSON log."""
    stream = sys.stderr if stderr else sys.stdout
    said = {key: redact(value) if isinstance(value, str) else value for key, value in said.items()}
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    print(json.dumps({"event": kind, "time": now, **said}, ensure_ascii=False, default=str), file=stream, flush=True)


def say(text: str, kind: str = "say") -> None:
    """One line, from rank 0. kind: `say`, or `stage` for the start of one."""
    if not is_main() or log_format() == "quiet":
        return
    if log_format() == "json":
        event(kind, {"text": text})
    else:
        console().print(redact(text), markup=False, style="bold" if kind == "stage" else None)


def heading(text: str) -> None:
    """The start of a stage."""
    say(text, "stage")


def complain(text: str) -> None:
    """An error, on stderr, once on each machine: local rank 0 prints it."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    if os.environ.get("TARE_LOG") == "json":  # not `log_format`: what is wrong may be that setting
        event("error", {"text": text}, stderr=True)
    else:
        console(stderr=True).print(redact(text), markup=False)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table from rank 0: numbers to the right with four digits, None as a dash."""
    if not is_main() or log_format() == "quiet":
        return
    if log_format() == "json":
        event("table", {"title": title, "columns": list(columns), "rows": [list(row) for row in rows]})
        return
    made = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        numeric = all(isinstance(row[index], int | float | None) for row in rows)
        made.add_column(column, justify="right" if numeric else "left")
    for row in rows:
        made.add_row(*(_cell(value) for value in row))
    console().print(made, markup=False, soft_wrap=False)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def quiet_transfers() -> None:
    """Leave the bars of huggingface_hub, whose transfers may take hours, to people: in a log they are pages."""
    if not sys.stderr.isatty() or os.environ.get("TARE_PROGRESS") == "0":
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()


def duration(seconds: float) -> str:
    """`45s`, `2m`, `1h05m`."""
    if seconds < 90:
        return f"{seconds:.0f}s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m"


class Steps:
    """Progress through `total` steps of `what`.

    with Steps("train", total=200) as steps:
        steps.advance(f"kl {kl:.4f}")
    """

    def __init__(self, what: str, total: int, unit: str = "step") -> None:
        self.what, self.total, self.unit, self.done = what, total, unit, 0
        self.first = 0  # steps that an earlier sitting had done
        self.shown = is_main() and os.environ.get("TARE_PROGRESS", "1") != "0"
        self._bar: Progress | None = None
        self._reached: dict[str, int] = {}
        self._told = False

    def __enter__(self) -> Steps:
        self.start = self.said = monotonic()
        screen = console()
        if self.shown and screen.is_terminal and log_format() == "text":
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, TextColumn("{task.fields[info]}"), console=screen, transient=True)
            self._bar.start()
            self._task = self._bar.add_task(f"{self.what} {self.unit}", total=self.total, completed=self.done, info="")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, info: str = "", by: int = 1) -> None:
        """`by` more steps are done; `info` stands beside the count."""
        self._told = True
        self.done += by
        if self._bar:
            self._bar.update(self._task, completed=self.done, info=info)
            return
        now = monotonic()
        quiet = LINE_EVERY_SECONDS if self.said > self.start else FIRST_LINE_SECONDS
        if self.shown and now - self.said >= quiet and self.done < self.total:
            self.said = now
            if log_format() == "json":
                said = {"what": self.what, "unit": self.unit, "done": self.done, "total": self.total}
                event("progress", said | {"info": info, "eta_seconds": round(self.eta(now))})
                return
            say(f"{self.what}  {self.unit} {self.done}/{self.total}  {info}  eta {duration(self.eta(now))}")

    def at(self, done: int, info: str = "") -> None:
        """`done` steps are done, those of an earlier sitting included: all before the first that is told here."""
        if not self._told:
            self.first = self.done = done - 1
        self.advance(info, by=done - self.done)

    def reach(self, info: str, done: int, of: int) -> None:
        """`done` of the `of` steps that belong to `info` are done, those told before included."""
        assert done <= of
        self.advance(info, by=done - self._reached.get(info, 0))
        self._reached[info] = done

    def eta(self, now: float) -> float:
        """Seconds left, at the mean rate of this sitting."""
        return (now - self.start) / max(self.done - self.first, 1) * (self.total - self.done)
