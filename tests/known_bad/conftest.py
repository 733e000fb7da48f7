"""An earlier run that was released, made once; every fault happens in a copy of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.known_bad.case import Note, Place
from tests.threads import one_thread


@pytest.fixture(scope="package", autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="package")
def earlier(on_one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = Place.new(tmp_path_factory.mktemp("earlier"))
    assert place.start() == 0 and place.summary["status"] == "released"
    return place.root


@pytest.fixture
def place(earlier: Path, tmp_path: Path) -> Place:
    return Place(shutil.copytree(earlier, tmp_path / "place"))


@pytest.fixture
def note(record_property: pytest.FixtureFunctionDefinition) -> Note:
    """Write a line of the table into pytest's report."""

    def write(fault: str, caught_by: str, said: str, refused: bool = True) -> None:
        for name, value in (("fault", fault), ("caught_by", caught_by), ("said", said), ("refused", refused)):
            record_property(name, value)

    return write
