"""The windows that a block learns from, and the loss: how far its output is from the parent's, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from calibrate.task import Batches, BlockTask

TOKENS = 8192  # that go through the block at once: bounds the activations kept for the backward pass


class Windows:
    """All windows of a task, by number, however they were batched; they are fetched when they are looked at.

    The loss of a token is |output - target|^2 / |target|^2. Several ranks share each step's windows between them.
    """

    def __init__(self, task: BlockTask) -> None:
        self.forward, self.inputs, self.targets = task.forward, task.inputs, task.targets
        sizes = [task.inputs[number].shape[:2] for number in range(len(task.inputs))]
        self.place = [(number, row) for number, (rows, _) in enumerate(sizes) for row in range(rows)]
        self.at_once = max(1, TOKENS // sizes[0][1])
        self.device = next(iter(task.weights.values())).device
        many = dist.is_available() and dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if many else (0, 1)

    def draw(self, steps: int, batch: int, seed: int) -> Iterator[list[int]]:
        """`steps` times `batch` windows: all of them in a random order, then again in another."""
        generator = torch.Generator().manual_seed(seed)
        waiting: list[int] = []
        for _ in range(steps):
            while len(waiting) < batch:
                waiting += torch.randperm(len(self.place), generator=generator).tolist()
            yield waiting[:batch]
            del waiting[:batch]

    def backward(self, chosen: list[int], gradients: Sequence[Tensor]) -> None:
        """Add the gradient of the summed loss of some windows to what the weights hold; `gradients`: all of that."""
        with torch.enable_grad():
            for part in self._split(chosen):
                self._losses(part).sum().backward()  # a mean would have gradients that float16 takes for 0
        if self.world > 1:
            for gradient in gradients:
                dist.all_reduce(gradient)

    @torch.no_grad()
    def mean(self) -> float:
        """The mean loss of all windows."""
        losses = torch.zeros(len(self.place), dtype=torch.float64, device=self.device)
        for part in self._split(list(range(len(self.place)))):
            losses[part] = self._losses(part).mean(-1).double()
        if self.world > 1:
            dist.all_reduce(losses)
        return losses.mean().item()

    def _split(self, chosen: list[int]) -> Iterator[list[int]]:
        """This rank's windows, as many as go through the block at once."""
        mine = chosen[self.rank :: self.world]
        for start in range(0, len(mine), self.at_once):
            yield mine[start : start + self.at_once]

    def _losses(self, chosen: list[int]) -> Tensor:
        """The loss of each token of some windows: float32 (len(chosen), length)."""
        targets = self._fetch(self.targets, chosen).float()
        error = (self.forward(self._fetch(self.inputs, chosen)).float() - targets).square().sum(-1)
        return error / targets.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)

    def _fetch(self, batches: Batches, chosen: list[int]) -> Tensor:
        places = [self.place[i] for i in chosen]
        rows: dict[tuple[int, int], Tensor] = {}
        for number in sorted({number for number, _ in places}):
            batch = batches[number]  # may come from host memory or disk: once for all its windows
            rows |= {place: batch[place[1]].to(self.device) for place in places if place[0] == number}
        return torch.stack([rows[place] for place in places])
