"""The windows that a block learns from, and the loss: how far its output is from the parent's, token by token."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from calibrate.task import BlockTask

TOKENS = 8192  # that go through the block at once: bounds the activations kept for the backward pass


class Windows:
    """All windows of a task, one after another, however they were batched.

    The loss of a token is |output - target|^2 / |target|^2.
    """

    def __init__(self, task: BlockTask) -> None:
        self.forward = task.forward
        self.inputs = [row for batch in task.inputs for row in batch]  # views
        self.targets = [row for batch in task.targets for row in batch]
        self.device = next(iter(task.weights.values())).device
        self.at_once = max(1, TOKENS // self.inputs[0].shape[0])

    def draw(self, steps: int, batch: int, seed: int) -> Iterator[list[int]]:
        """`steps` times `batch` windows: all of them in a random order, then again in another."""
        generator = torch.Generator().manual_seed(seed)
        waiting: list[int] = []
        for _ in range(steps):
            while len(waiting) < batch:
                waiting += torch.randperm(len(self.inputs), generator=generator).tolist()
            yield waiting[:batch]
            del waiting[:batch]

    def backward(self, chosen: list[int]) -> None:
        """Add the gradient of the mean loss of some windows to what the weights hold."""
        with torch.enable_grad():
            for part in self._split(chosen):
                (self._loss(part) * (len(part) / len(chosen))).backward()

    @torch.no_grad()
    def mean(self) -> float:
        """The mean loss of all windows."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for part in self._split(list(range(len(self.inputs)))):
            total += self._loss(part).double() * len(part)
        return total.item() / len(self.inputs)

    def _split(self, chosen: list[int]) -> Iterator[list[int]]:
        for start in range(0, len(chosen), self.at_once):
            yield chosen[start : start + self.at_once]

    def _loss(self, chosen: list[int]) -> Tensor:
        """The mean loss of some windows."""
        inputs, targets = (
            torch.stack([rows[i] for i in chosen]).to(self.device) for rows in (self.inputs, self.targets)
        )
        targets = targets.float()
        error = (self.forward(inputs).float() - targets).square().sum(-1)
        return (error / targets.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)).mean()
