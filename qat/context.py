"""Windows of text are no longer than the model reads. `tare plan` asks as well, so nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qat.recipe import Recipe


def check(recipe: Recipe, longest: Any) -> None:
    """Raise ValueError for windows of calibration, training or evaluation longer than `longest` tokens.

    longest: max_position_embeddings of the parent's config; where that states none, nothing is too long.
    """
    for part, key, length in _windows(recipe):
        try:
            check_length(length, longest, f"shorten {key}")
        except ValueError as error:
            raise ValueError(f"data.{part}: {error}") from error


def check_length(length: int, longest: Any, way_out: str) -> None:
    """The same for windows of one length. way_out: what the error ends with."""
    if isinstance(longest, int) and 0 < longest < length:
        raise ValueError(f"windows of {length} tokens are longer than the model reads ({longest}); {way_out}")


def _windows(recipe: Recipe) -> Iterator[tuple[str, str, int]]:
    """(part of data, key, length) of all windows that a run cuts."""
    data = recipe.data
    yield "calibration", "length", data.calibration.length
    for length in sorted({train.length for _, one in recipe.by_variant for train in one.trainings}):
        yield "training", "train.length", length
    if recipe.gate is not None and data.evaluation:
        yield "evaluation", "length", data.evaluation.length
