"""The calibration text on its way through the model: one stream of hidden states, or two, and what linears see of it.

"parent": what the full-precision blocks give. "quantized": what the blocks give that are quantized already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from calibrate import sensitivity
from calibrate.activations import DEVICE_BYTES, Activations
from calibrate.block import Seconds, put
from calibrate.inputs import InputStats
from calibrate.kv import KvRecorder
from calibrate.staged import Passage
from qat.artifact import save_tensors
from qat.checkpoint import SafetensorsFolder
from qat.model import Model

STATES = "states"
TOKEN_WEIGHTS = "token-weights-{rank}-of-{world}.safetensors"


class Streams:
    """Hidden states of this rank's windows between blocks.

    windows: int64 (num_windows, length). batch: windows that go through a block together. groups: of each block, the
    covered linears by shared input, full names. folder: where states go that find no room. names: of the streams.
    split: the windows are a rank's share, so statistics are put together; else every rank has all of them.
    """

    def __init__(
        self,
        model: Model,
        windows: Tensor,
        batch: int,
        groups: Sequence[list[list[str]]],
        host_bytes: int,
        folder: Path,
        rank: int,
        names: Sequence[str],
        seconds: Seconds,
        split: bool,
    ) -> None:
        self.model, self.windows, self.batch, self.groups, self.seconds = model, windows, batch, groups, seconds
        self.host_bytes, self.folder, self.rank, self.split = host_bytes, folder, rank, split
        self.token_weights: SafetensorsFolder | None = None
        self.token_means: dict[str, float] = {}
        self.recorder: KvRecorder | None = None
        parts = windows.split(batch)
        self.streams = {
            name: Activations(
                [len(part) for part in parts],
                windows.shape[1],
                model.config.hidden_size,
                model.dtype,
                model.device,
                host_bytes // len(names),
                folder,
                f"{STATES}-{name}-{rank}",
            )
            for name in names
        }
        with model.ends(), torch.no_grad():
            for number, ids in enumerate(parts):
                for states in self.streams.values():
                    states[number] = model.embed(ids)

    def close(self) -> None:
        for states in self.streams.values():
            states.close()

    def weigh_tokens(self, seed: int, world: int, num_windows: int) -> None:
        """How much the model's output depends on each linear at each token; once for a folder.

        num_windows: of all ranks.
        """
        path = self.folder / TOKEN_WEIGHTS.format(rank=self.rank, world=world)
        if not path.exists():
            mine = slice(self.rank, None, world) if self.split else slice(None)
            drawn = sensitivity.chance(num_windows, self.windows.shape[1], seed)[mine]
            with self.seconds.of("sensitivity"):
                found = sensitivity.token_weights(
                    self.model, self.windows, self.groups, drawn, self.batch, self.host_bytes
                )
            save_tensors(found, path)
        self.token_weights = SafetensorsFolder(self.folder, [path.name])
        stored = {name: self.token_weights.get(name) for name in sorted(self.token_weights.names())}
        self.token_means = sensitivity.means(stored, self.model.device)

    @torch.no_grad()
    def advance(self, index: int, name: str) -> None:
        """Move a stream behind a loaded block."""
        states = self.streams[name]
        with self.seconds.of("forward"):
            for number in range(len(states)):
                states[number] = self._checked(index, self.forward(index, states, number))

    @contextmanager
    def recording(self, wanted: bool) -> Iterator[KvRecorder | None]:
        """While it lasts, what blocks hand to their cache is counted; at its end, over all ranks."""
        self.recorder = KvRecorder(self.model.device) if wanted else None
        yield self.recorder
        if self.recorder and self.split:
            self.recorder.reduce()
        self.recorder = None

    def pass_by(self, index: int, quantized: Callable[[], Mapping[str, Tensor]]) -> None:
        """Move every stream behind a loaded block that has its file already; `quantized` reads the tensors in it."""
        for name in sorted(self.streams):  # the parent's weights are in the module at first
            if name == "quantized":
                for tensor, value in quantized().items():
                    put(self.model, tensor, value)
            self.advance(index, name)

    def forward(self, index: int, states: Activations, number: int) -> Tensor:
        extra = self.recorder.argument(self.model.blocks[index]) if self.recorder else {}
        return self.model.run_block(index, states[number], **extra)

    def _checked(self, index: int, hidden: Tensor) -> Tensor:
        if not torch.isfinite(hidden).all():
            raise ValueError(
                f"block {index} gives non-finite values on the calibration text in {self.model.dtype}; set "
                "compute.dtype to bfloat16 or float32, or, where even that overflows, choose another revision of the "
                "parent"
            )
        return hidden

    @torch.no_grad()
    def watch(self, index: int, name: str, needs: frozenset[str], move: bool) -> dict[str, InputStats]:
        """Run a stream through a loaded block; statistics of the inputs of each covered linear, over all ranks."""
        states, stats = self.streams[name], {}
        batch_weights: dict[str, Tensor] = {}
        handles = []
        for group in self.groups[index]:
            linear = self.model.root.get_submodule(group[0])
            shared = InputStats(needs, linear.in_features, self.model.device)
            stats.update(dict.fromkeys(group, shared))
            handles.append(linear.register_forward_pre_hook(_watch(shared, group[0], batch_weights)))
        weights = self._weights_of(stats)
        with self.seconds.of("forward"):
            for number in range(len(states)):
                batch_weights.update({name: self._part(w, number) for name, w in weights.items()})
                hidden = self._checked(index, self.forward(index, states, number))
                if move:
                    states[number] = hidden
        for handle in handles:
            handle.remove()
        if self.split:
            for group in self.groups[index]:
                stats[group[0]].reduce()
        return stats

    @torch.no_grad()
    def in_order(
        self, index: int, name: str, needs: frozenset[str], quantize: Callable[[list[str], InputStats], object]
    ) -> None:
        """Take a stream through a loaded block; each group is quantized when all batches have come to it."""
        states, groups = self.streams[name], self.groups[index]
        if not groups:  # a block that the scheme skips
            return self.advance(index, name)
        first = [self.model.root.get_submodule(group[0]) for group in groups]
        stats = [InputStats(frozenset(), 0)] * len(groups)
        weights = self._weights_of(dict.fromkeys([group[0] for group in groups]))

        def open_(group: int) -> InputStats:
            if not stats[group].needs:  # made when it is needed: a Hessian is large
                stats[group] = InputStats(needs, first[group].in_features, self.model.device)
            return stats[group]

        def see(group: int, batch: int, x: Tensor) -> None:
            weight = weights.get(groups[group][0])
            with self.seconds.of("statistics"):
                open_(group).update(x, None if weight is None else self._part(weight, batch))

        def ready(group: int) -> None:
            open_(group).reduce()
            quantize(groups[group], stats[group])
            stats[group] = InputStats(frozenset(), 0)

        def done(batch: int, hidden: Tensor) -> None:
            states[batch] = self._checked(index, hidden)

        widest = max(linear.in_features for linear in first)
        waiting = self.windows.numel() * (2 * self.model.config.hidden_size + widest) * self.model.dtype.itemsize
        experts = self.model.arch.at(index).experts is not None  # many small groups: never anew for each
        forwards = [partial(self.forward, index, states, number) for number in range(len(states))]
        with self.seconds.of("forward, quantize"):
            Passage(forwards, first, see, ready, done).run(hold=waiting <= 2 * DEVICE_BYTES or experts)

    def _weights_of(self, linears: Mapping[str, object]) -> dict[str, Tensor]:
        """Token weights (num_windows, length), with a mean of 1 over all ranks, of the linears that have some."""
        if self.token_weights is None:
            return {}
        return {name: self.token_weights.get(name) / mean for name, mean in self.token_means.items() if name in linears}

    def _part(self, x: Tensor, number: int) -> Tensor:
        return x[number * self.batch : (number + 1) * self.batch].to(self.model.device)


def _watch(stats: InputStats, name: str, weights: Mapping[str, Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        stats.update(args[0], weights.get(name))

    return hook
