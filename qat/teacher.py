"""Where the teacher's outputs come from while the student trains.

    Resident      both models in memory; exact
    HiddenCache   the last block's outputs, computed before training and kept on disk: h a bytes a token; exact
    TopCache      the k most likely tokens and their probability, the rest as one event: 6 k bytes a token; a lower
                  bound of the KL. The windows held out for validation are kept exactly

Caches lie in the stage's folder, one per rank with the windows that the rank will see, and survive an interruption.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from qat import report
from qat.losses import kl, top_kl, top_log
from qat.model import Model
from qat.student import run_blocks

Target = tuple[Tensor, ...]  # each (batch, length, ...)


class Teacher(Protocol):
    """A source of targets. `model` holds embedding, final norm and head in any case."""

    model: Model

    def stored(self, numbers: Tensor) -> Target | None:
        """Targets of windows by their numbers, on the device; None when `run` makes them."""

    def run(self, ids: Tensor) -> Target:
        """Targets of token ids (batch, length)."""

    def divergence(self, target: Target, logits: Tensor, temperature: float) -> Tensor:
        """KL to the student's logits (tokens, vocabulary), summed; target: each (tokens, ...)."""

    def hidden(self, numbers: Tensor, ids: Tensor) -> Tensor:
        """The teacher's last hidden states of held-out windows."""


class Resident:
    """The teacher in memory."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def stored(self, numbers: Tensor) -> Target | None:
        return None

    @torch.no_grad()
    def run(self, ids: Tensor) -> Target:
        return (run_blocks(self.model, ids),)

    def divergence(self, target: Target, logits: Tensor, temperature: float) -> Tensor:
        with torch.no_grad():
            goal = self.model.logits(target[0])
        return kl(goal, logits, temperature)

    def hidden(self, numbers: Tensor, ids: Tensor) -> Tensor:
        return self.run(ids)[0]


class HiddenCache(Resident):
    """The teacher's last hidden states in a file.

    windows: all (num_windows, length) token ids; numbers: those that this rank will ask for; batch: windows at once.
    The model's blocks are freed afterwards.
    """

    def __init__(self, model: Model, windows: Tensor, numbers: Tensor, path: Path, batch: int) -> None:
        super().__init__(model)
        wanted = numbers.unique()
        self._row = {int(number): row for row, number in enumerate(wanted)}
        width = (windows.shape[1], model.config.hidden_size)
        self._states = _Store(path, {"hidden": (model.dtype, (len(wanted), *width))}, [windows[wanted], batch])
        if not self._states.complete:
            for row, hidden in enumerate(_outputs(model, windows[wanted], batch)):
                self._states["hidden"][row] = hidden[0].cpu()
            self._states.finish()
        free_blocks(model)

    def rows(self, numbers: Tensor) -> list[int]:
        return [self._row[int(number)] for number in numbers]

    def stored(self, numbers: Tensor) -> Target | None:
        return (to_device(self._states["hidden"][self.rows(numbers)], self.model.device),)

    def run(self, ids: Tensor) -> Target:
        raise AssertionError("a cached teacher does not run")

    def hidden(self, numbers: Tensor, ids: Tensor) -> Tensor:
        found = self.stored(numbers)
        assert found is not None
        return found[0]


class TopCache(HiddenCache):
    """The teacher's `top` most likely tokens in a file; `held` windows as hidden states.

    tail: mean probability outside the top, over the cached training tokens.
    """

    def __init__(
        self,
        model: Model,
        windows: Tensor,
        numbers: Tensor,
        held: Tensor,
        path: Path,
        batch: int,
        top: int,
        temperature: float,
        chunk: int,
    ) -> None:
        wanted, length = numbers[~torch.isin(numbers, held)].unique(), windows.shape[1]
        self._top_row = {int(number): row for row, number in enumerate(wanted)}
        shape = (len(wanted), length, top)
        layout = {"indices": (torch.int32, shape), "p_log": (torch.float16, shape)}
        self._top = _Store(path.with_name(path.name + "-top"), layout, [windows[wanted], batch, temperature, chunk])
        if not self._top.complete:
            states = _outputs(model, windows[wanted], batch)
            for row, hidden in enumerate(states):
                with torch.no_grad(), model.ends():
                    pieces = [top_log(model.logits(h), top, temperature) for h in hidden[0].split(chunk)]
                for name, part in zip(layout, zip(*pieces, strict=True), strict=True):
                    self._top[name][row] = torch.cat(part).cpu()
            self._top.finish()
        sums = [float(p.float().exp().sum()) for p in self._top["p_log"]]
        self.tail = 1 - sum(sums) / (len(sums) * length)
        super().__init__(model, windows, held, path, batch)

    def stored(self, numbers: Tensor) -> Target | None:
        rows = [self._top_row[int(number)] for number in numbers]
        return tuple(to_device(self._top[name][rows], self.model.device) for name in ("indices", "p_log"))

    def divergence(self, target: Target, logits: Tensor, temperature: float) -> Tensor:
        return top_kl(target[0], target[1], logits, temperature)

    def hidden(self, numbers: Tensor, ids: Tensor) -> Tensor:
        return self._states["hidden"][self.rows(numbers)].to(self.model.device)


class _Store:
    """Named tensors in memory-mapped files path-<name>.bin; `complete` once `finish` was called for such `content`."""

    def __init__(self, path: Path, layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], content: list) -> None:
        digest = hashlib.sha256(repr(sorted((n, str(d), s) for n, (d, s) in layout.items())).encode())
        for value in content:
            digest.update(value.numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode())
        self._said, self._mark = {"content": digest.hexdigest()}, path.with_name(path.name + ".json")
        self.complete = self._mark.exists() and json.loads(self._mark.read_text()) == self._said
        if not self.complete:
            self._mark.unlink(missing_ok=True)
        self._tensors = {}
        for name, (dtype, shape) in layout.items():
            file = str(path.with_name(f"{path.name}-{name}.bin"))
            size = torch.Size(shape).numel()
            with open(file, "ab") as f:  # the space is taken now: a full disk is an error here, not a crash later
                os.posix_fallocate(f.fileno(), 0, size * dtype.itemsize)
            self._tensors[name] = torch.from_file(file, shared=True, size=size, dtype=dtype).view(shape)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def finish(self) -> None:
        part = self._mark.with_suffix(".json.part")
        part.write_text(json.dumps(self._said))
        part.replace(self._mark)


@torch.no_grad()
def _outputs(model: Model, windows: Tensor, batch: int) -> Iterator[Tensor]:
    """The last block's output (1, length, hidden) of each window, whether the blocks stay in memory or are streamed."""
    with report.Steps("teacher", total=len(windows), unit="window") as steps:
        for hidden in model.hidden(windows, batch) if not model.resident else _resident(model, windows, batch):
            steps.advance()
            yield hidden


def _resident(model: Model, windows: Tensor, batch: int) -> Iterator[Tensor]:
    with model.ends():
        for ids in windows.split(batch):
            yield from run_blocks(model, ids).split(1)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy without waiting for what the device still computes: a GPU does that from page-locked memory only."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def free_blocks(model: Model) -> None:
    """Drop the weights of the blocks; embedding, final norm and head stay."""
    for block in model.blocks:
        block.to("meta")
