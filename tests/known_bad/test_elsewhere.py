"""The table's lines for tests of other files point to tests that are there."""

from __future__ import annotations

from qat.plugins import ROOT
from tests.known_bad.elsewhere import LINES


def test_every_line_names_a_test_that_exists() -> None:
    for line in LINES:
        file, _, name = line.test.partition("::")
        function, _, parameter = name.partition("[")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert f"def {function}(" in text and f'"{parameter.removesuffix("]")}' in text, line.test
    assert len({line.fault for line in LINES}) == len(LINES)
