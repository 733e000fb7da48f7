"""Loss and gradients of one micro-batch: the unit that is repeated, and that a CUDA graph holds.

Blocks run to the last hidden state; head and loss follow in chunks of tokens, forward and backward each, so that logits
of all tokens never exist at once. Gradients and loss are added to buffers that stay where they are: a captured graph
(teacher, student, backward) is replayed with one launch, where small models spend most of a step on launches.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import psutil
import torch
from torch import Tensor

from qat.losses import hidden_error, next_token
from qat.student import Student, run_blocks
from qat.teacher import Target, Teacher, to_device

LIVE = 8  # tensors (tokens, vocabulary) of 4 bytes that the head and the loss hold at once
LOGIT_BYTES = {"cpu": 512 * 2**20, "cuda": 4 * 2**30}  # for all of them together
SPARE = 0.8  # of the free memory that activations may take
# Relative differences that a captured graph may show, in steps of the dtype: libraries may choose other kernels in a
# capture, and those of one gradient then differ as roundings do (0.0016 in bfloat16, where two eager runs agreed).
SAME_LOSS, SAME_GRADIENT, LEAST = 0.25, 4, 1e-3


def tokens_at_once(device: torch.device, vocabulary: int) -> int:
    """Tokens in a chunk of the head."""
    return max(16, LOGIT_BYTES[device.type] // (4 * vocabulary * LIVE))


def head_loss(
    teacher: Teacher,
    student: Student,
    target: Target,
    hidden: Tensor,
    ids: Tensor,
    weights: Mapping[str, float],
    temperature: float,
    tokens: int,
) -> Tensor:
    """The weighted loss of a micro-batch, as its share of a mean over `tokens`; float32 scalar without a gradient.

    target: of `teacher`; hidden: the student's last block's output (batch, length, hidden), into which backward runs
    when it needs a gradient; ids: (batch, length). weights: of kl, ce (the next token) and hidden (relative squared
    error of the last hidden state).
    """
    leaf = hidden.detach().requires_grad_(hidden.requires_grad)
    chunk = tokens_at_once(hidden.device, student.config.vocab_size)
    length = ids.shape[1]
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100).flatten()
    total = torch.zeros((), device=hidden.device)
    pieces = zip(leaf.flatten(0, 1).split(chunk), labels.split(chunk), *(t.flatten(0, 1).split(chunk) for t in target),
                 strict=True)  # fmt: skip
    for states, next_ids, *goal in pieces:
        loss = torch.zeros((), device=hidden.device)
        if "hidden" in weights:
            loss = loss + hidden_error(goal[0], states) * (weights["hidden"] / tokens)
        if "kl" in weights or "ce" in weights:
            logits = student.logits(states)
            if "kl" in weights:
                loss = loss + teacher.divergence(tuple(goal), logits, temperature) * (weights["kl"] / tokens)
            if "ce" in weights:
                loss = loss + next_token(logits, next_ids) * (weights["ce"] * length / (tokens * (length - 1)))
        if leaf.requires_grad:
            loss.backward()
        total += loss.detach()
    if leaf.requires_grad:
        hidden.backward(leaf.grad)
    return total


class Backward:
    """Adds a micro-batch's share of the loss to `loss` and of the gradients to `student.parts[...].grad`.

    tokens: of all micro-batches of a step on this rank. checkpointed: blocks whose forward pass backward repeats.
    graph: capture into CUDA graphs, one per shape; needs a CUDA device. Raises ValueError when a captured graph does
    not give what the same kernels gave outside it.
    """

    def __init__(
        self,
        teacher: Teacher,
        student: Student,
        weights: Mapping[str, float],
        temperature: float,
        tokens: int,
        checkpointed: int = 0,
        graph: bool = False,
    ) -> None:
        self.teacher, self.student, self.weights, self.temperature = teacher, student, weights, temperature
        self.tokens, self.checkpointed, self.graph = tokens, checkpointed, graph
        self.loss = torch.zeros((), device=student.device)
        self._graphs: dict[tuple[int, ...], tuple[Any, Tensor, Target | None]] = {}

    def zero(self) -> None:
        self.loss.zero_()
        self.student.zero_grad()

    def add(self, ids: Tensor, numbers: Tensor) -> None:
        """One micro-batch (batch, length) of token ids; numbers: of its windows. Inside `ends()`."""
        ids, target = to_device(ids, self.student.device), self.teacher.stored(numbers)
        if not self.graph:
            self._run(ids, target)
            return
        shape = tuple(ids.shape)
        if shape not in self._graphs:
            self._graphs[shape] = self._capture(ids, target)
        captured, its_ids, its_target = self._graphs[shape]
        its_ids.copy_(ids)
        for mine, new in zip(its_target or (), target or (), strict=True):
            mine.copy_(new)
        captured.replay()

    def _run(self, ids: Tensor, target: Target | None) -> None:
        if target is None:
            target = self.teacher.run(ids)
        hidden = run_blocks(self.student, ids, self.checkpointed)
        loss = head_loss(self.teacher, self.student, target, hidden, ids, self.weights, self.temperature, self.tokens)
        self.loss.add_(loss)

    def _buffers(self) -> list[Tensor]:
        return [self.loss, *(part.grad for part in self.student.parts.values())]

    def _capture(self, ids: Tensor, target: Target | None) -> tuple[Any, Tensor, Target | None]:
        """A graph over copies of its inputs; the buffers are left as they were."""
        ids, target = ids.clone(), None if target is None else tuple(t.clone() for t in target)
        buffers = self._buffers()
        before = [b.clone() for b in buffers]
        # libraries and the allocator settle outside the capture, on a stream that is not the default one
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            runs: list[list[Tensor]] = []
            for _ in range(3):
                for b in buffers:
                    b.zero_()
                self._run(ids, target)
                runs = [*runs[-1:], [b.clone() for b in buffers]]
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run(ids, target)
        for b in buffers:
            b.zero_()
        graph.replay()
        step = torch.finfo(self.student.dtype).eps
        same = [SAME_LOSS] + [SAME_GRADIENT] * (len(buffers) - 1)
        _check_same(runs, buffers, [max(LEAST, steps * step) for steps in same])
        for b, old in zip(buffers, before, strict=True):
            b.copy_(old)
        return graph, ids, target


def _check_same(runs: list[list[Tensor]], found: list[Tensor], tolerances: list[float]) -> None:
    """Two runs of a step outside a graph, one within.

    Kernels that add in any order (attention's backward) make even two runs differ, by most of a percent of a bfloat16
    gradient: three times that is allowed on top.
    """
    for before, a, b, tolerance in zip(*runs, found, tolerances, strict=True):
        apart, size, noise = float((a - b).norm()), float(a.norm()), float((a - before).norm())
        if not apart <= tolerance * size + 3 * noise:  # NaN differs too
            raise ValueError(
                f"a CUDA graph of the training step differs by {apart:.2g} of {size:.2g} from the step itself (at most "
                f"{tolerance:g} of it, and three times the {noise:.2g} that two steps differ by): set train.cuda_graph "
                "to false"
            )


def kept_bytes(student: Student, batch: int, length: int) -> int:
    """Bytes that one block keeps for backward, measured on a forward pass of zeros (batch, length, hidden)."""
    shape = (batch, length, student.config.hidden_size)
    hidden = torch.zeros(shape, device=student.device, dtype=student.dtype, requires_grad=True)
    block = student.blocks[0]
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        # asked for here, as weights that are split over ranks are only whole while their block runs
        held = {p.untyped_storage().data_ptr() for p in block.parameters()}
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an output that is kept as it is would hold its own graph, and the student, for ever

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = student.run_block(0, hidden)
    del out
    return sum(kept.values())


def blocks_to_checkpoint(student: Student, batch: int, length: int, free: int | None = None) -> int:
    """How many blocks must repeat their forward pass for the rest's activations to fit.

    free: bytes; by default SPARE of the memory that is free, on a CPU this rank's share of it.
    """
    device = student.device
    if free is None and device.type == "cuda":
        torch.cuda.empty_cache()
        free = int(SPARE * torch.cuda.mem_get_info(device)[0])
    elif free is None:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # ranks that share this machine's memory
        free = int(SPARE * psutil.virtual_memory().available) // here
    logits = min(LOGIT_BYTES[device.type], 4 * LIVE * batch * length * student.config.vocab_size)
    fits = max(0, free - logits) // max(1, kept_bytes(student, batch, length))
    return max(0, len(student.blocks) - fits)
