"""Faults for lint to find: changes of a directory's tensors, or of its config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Change = Callable[[dict[str, Any]], Any]


def put(name: str, value: Tensor | Callable[[Tensor], Tensor]) -> Change:
    return lambda t: t.update({name: value(t[name]) if callable(value) else value})


def drop(name: str) -> Change:
    return lambda t: t.pop(name)


def first(value: float) -> Callable[[Tensor], Tensor]:
    """Put a value into the first place of a tensor."""

    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor

    return change


def config(**values: object) -> Change:
    return lambda c: c.update(values)


def quantization(**values: object) -> Change:
    return lambda c: c["quantization_config"].update(values)
