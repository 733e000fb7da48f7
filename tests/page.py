"""A written report as data: which numbers the page shows, and whether each is the one of the JSON file beside it."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


class Page(HTMLParser):
    """Tags with attributes, the text of those with a data-path, and the titles of marks."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.numbers: list[tuple[dict[str, str | None], str]] = []
        self.titles: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open.append((tag, dict(attrs)))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not self.open:
            return
        tag, attrs = self.open[-1]
        if tag == "span" and "data-path" in attrs:
            self.numbers.append((attrs, data))
        if tag == "title" and len(self.open) > 1 and self.open[-2][1].get("data-path"):
            self.titles.append((self.open[-2][1]["data-path"] or "", data))


def at(data: Any, pointer: str) -> Any:
    """What a JSON pointer (RFC 6901) leads to."""
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        data = data[int(key)] if isinstance(data, list) else data[key]
    return data


def numbers(path: Path) -> set[str]:
    """Pointers to the numbers that a page shows, after each was found equal to that of the JSON file beside it."""
    page, kept = Page(path.read_text(encoding="utf-8")), json.loads(path.with_suffix(".json").read_text())
    for attrs, text in page.numbers:
        value, spec = at(kept, attrs["data-path"] or ""), attrs.get("data-format") or ""
        assert text == format(value * float(attrs["data-factor"]) if attrs.get("data-factor") else value, spec), attrs
    for pointers, said in page.titles:
        for pointer in pointers.split():
            value = at(kept, pointer)
            assert any(format(value, spec) in said for spec in (".5f", ".3f", ".3g")), (pointers, said)
    return {attrs["data-path"] or "" for attrs, _ in page.numbers}
