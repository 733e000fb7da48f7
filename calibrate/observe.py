"""The block-by-block runner: reads a block of the parent, watches its inputs, quantizes it, writes it, moves on.

A rounding says (`PREFIX`) which inputs it wants to see: those that the parent gives, or those that the blocks before,
already quantized, give. In the first case the text runs through the parent itself. In the second it runs through the
quantized model, group by group (`calibrate.staged`). A rounding that works on a whole block sees both.

An interrupted run goes on with the next block and ends with the same bytes: blocks whose file exists are run forward.
Over several ranks the windows are split and the statistics put together; every rank then does the same arithmetic and
rank 0 writes.

In memory: one block, in the computing dtype while it runs and in float32 while it is quantized, the statistics of its
inputs, and the hidden states of all windows (`calibrate.activations`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from calibrate import check, table
from calibrate.block import Block, Chosen, Seconds
from calibrate.streams import STATES, TOKEN_WEIGHTS, Streams
from qat import coverage, plugins
from qat.artifact import REST, block_file, check_finite, is_whole, read_block, save_tensors, write_meta
from qat.checkpoint import Tensors
from qat.index import side_files
from qat.model import Model
from qat.scheme import Scheme, Section
from qat.sections import ANSWERS

QUESTIONS = ("transform", "range", "round", "inputs")
ACTIVATION_BYTES = 4 * 2**30


class Method(Protocol):
    """A plugin by name, with its options; `qat.sections.Choice` is one."""

    @property
    def name(self) -> str: ...

    @property
    def options(self) -> Section: ...


def run(
    config: Any,
    tensors: Tensors,
    scheme: Scheme,
    windows: Tensor | None,
    methods: Mapping[str, Method],
    source: Path,
    out: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    batch: int = 8,
    seed: int = 0,
    activation_bytes: int = ACTIVATION_BYTES,
    progress: Callable[[int, int, float], None] = lambda done, total, error: None,
) -> dict[str, Any]:
    """Quantize a model into the artifact folder `out`; returns metrics. Called on all ranks; rank 0 writes.

    config, tensors: of the parent, whose other files (config, tokenizer, licence) lie in the folder `source`. windows:
    calibration token ids (num_windows, length) int64; None will do when no method looks at inputs. methods: for
    `transform`, `range`, `round`, `inputs`. batch: windows that go through a block together. seed: of what is drawn.
    activation_bytes: of host memory for hidden states; more of them go to disk, beside the blocks. progress: called
    with blocks done, blocks in all, relative error of the last one.

    Block files that `out` already holds are kept: hand the same folder to the same arguments only. Raises ValueError
    for what a person can mend: shapes, methods, non-finite weights.
    """
    runner = _Runner(config, tensors, scheme, windows, methods, out, torch.device(device), dtype, batch, seed)
    runner.prepare()
    out.mkdir(parents=True, exist_ok=True)
    todo = runner.todo()
    if runner.writes and not is_whole(out / REST):
        outside = [name for name in tensors.names() if not name.startswith(runner.model.arch.blocks + ".")]
        with runner.seconds.of("embedding and head"):
            save_tensors({name: runner.read(name) for name in outside}, out / REST)
    runner.blocks(todo, activation_bytes, progress)
    if not runner.writes:
        return {}
    for file in side_files(source):
        shutil.copyfile(file, out / file.name)
    stems = [_stem(index) for index in range(runner.num_blocks)]
    rows = table.join([out / f"{stem}-{table.TABLE}" for stem in stems], out / table.TABLE)
    table.join([out / f"{stem}-{table.SECONDS}" for stem in stems], out / table.SECONDS, table.SECONDS_COLUMNS)
    for left in (*out.glob(TOKEN_WEIGHTS.format(rank="*", world="*")), *out.glob(f".{STATES}-*")):
        left.unlink()
    said = {question: {"name": m.name, **m.options.model_dump()} for question, m in methods.items()}
    write_meta(out, scheme, runner.formats, {"calibrate": said})
    return {
        "linears": len(rows),
        "tokens": runner.num_tokens,
        **table.means(rows),
        "without_statistics": [row["layer"] for row in rows if row["treatment"]],
        "blocks_reused": runner.num_blocks - len(todo),
        "seconds": {what: round(value, 3) for what, value in runner.seconds.items()},
    }


class _Runner:
    def __init__(
        self,
        config: Any,
        tensors: Tensors,
        scheme: Scheme,
        windows: Tensor | None,
        methods: Mapping[str, Method],
        out: Path,
        device: torch.device,
        dtype: torch.dtype,
        batch: int,
        seed: int,
    ) -> None:
        self.tensors, self.scheme, self.out, self.batch, self.seed = tensors, scheme, out, batch, seed
        self.methods = {
            question: Chosen(m.name, plugins.find(ANSWERS[question], m.name), m.options)
            for question, m in methods.items()
        }
        rounding = self.methods["round"].module
        self.prefix, self.whole_block = getattr(rounding, "PREFIX", False), hasattr(rounding, "block")
        self.held = _Held(tensors)
        self.model = Model(config, self.held, device, dtype)
        self.num_blocks = len(self.model.blocks)
        self.seconds = Seconds()
        many = dist.is_available() and dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if many else (0, 1)
        self.windows, self.all_windows = windows, windows
        if windows is not None and not self.whole_block:
            self.windows = windows[self.rank :: self.world]

    @property
    def writes(self) -> bool:
        return self.rank == 0

    @property
    def num_tokens(self) -> int:
        return self.all_windows.numel() if self.all_windows is not None and self.looks else 0

    def prepare(self) -> None:
        """Everything that can be refused without reading a weight."""
        self.formats = coverage.formats(self.model.arch, self.model.in_features, self.scheme)
        check.methods(self.formats, {question: (m.name, m.module) for question, m in self.methods.items()})
        static = self.scheme.inputs is not None and not self.scheme.inputs.dynamic
        self.transform_needs = frozenset(self.methods["transform"].module.NEEDS)
        needs = set(self.methods["range"].module.NEEDS) | set(self.methods["round"].module.NEEDS)
        needs |= {"histogram"} if static else set()
        self.looks = bool(needs or self.transform_needs or self.prefix or self.scheme.kv_cache)
        self.needs = frozenset(needs | {"second_moment"} if self.looks else needs)  # the table has a use for the latter
        coverage.check_range(self.model.arch, self.methods["range"].name)
        if not self.looks:
            return
        asked = ", ".join(sorted(needs | self.transform_needs)) or self.methods["round"].name
        if self.all_windows is None or not self.all_windows.numel():
            raise ValueError(f"calibration text is needed for {asked}; set data.calibration")
        if not self.whole_block and len(self.all_windows) < self.world:
            raise ValueError(
                f"{len(self.all_windows)} calibration windows cannot be split over {self.world} ranks; "
                "set data.calibration.sequences to at least that many"
            )

    def todo(self) -> list[int]:
        """The blocks without a whole file, as rank 0 sees them."""
        said = [[index for index in range(self.num_blocks) if not is_whole(self.out / block_file(index))]]
        if self.world > 1:
            dist.broadcast_object_list(said)
        return said[0]

    def read(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """A tensor of the parent as stored. Raises ValueError for a NaN or infinity in it."""
        tensor = self.tensors.get(name).to(device)  # not in one step with another dtype, which would be the CPU's work
        try:
            check_finite({name: tensor})
        except ValueError as error:
            raise ValueError(
                f"{error}: the parent's weights are damaged or diverged; fetch them again, or choose another revision"
            ) from error
        return tensor

    def groups(self, index: int) -> list[list[str]]:
        """The covered linears of a block by shared input, full names."""
        shared = self.model.arch.shared(index)
        return [covered for group in shared if (covered := [name for name in group if name in self.formats])]

    def blocks(self, todo: list[int], activation_bytes: int, progress: Callable[[int, int, float], None]) -> None:
        """Quantize every block of `todo`, in order."""
        streams = self.streams(activation_bytes) if todo and self.looks else None
        try:
            for index in range(max(todo, default=-1) + 1):
                if index in todo:
                    progress(index + 1, self.num_blocks, self.quantize(index, streams))
                elif streams:
                    with self.model.block(index):
                        streams.pass_by(index, partial(read_block, self.out / block_file(index), self.formats))
        finally:
            if streams:
                streams.close()

    def streams(self, activation_bytes: int) -> Streams:
        """The text before the first block."""
        assert self.windows is not None
        names = [*(["quantized"] if self.prefix else []), *(["parent"] if self.whole_block or not self.prefix else [])]
        groups = [self.groups(index) for index in range(self.num_blocks)]
        streams = Streams(
            self.model,
            self.windows,
            self.batch,
            groups,
            activation_bytes,
            self.out,
            self.rank,
            names,
            self.seconds,
            split=not self.whole_block,
        )
        if "kl_hessian" in self.needs:
            assert self.all_windows is not None
            streams.weigh_tokens(self.seed, self.world, len(self.all_windows))
        return streams

    @torch.no_grad()
    def quantize(self, index: int, streams: Streams | None) -> float:
        """Write a block's file and its rows of the table; returns its mean relative error."""
        prefix, device = f"{self.model.arch.blocks}.{index}.", self.model.device
        groups = self.groups(index)
        with self.seconds.of("read"):
            weights = {f"{name}.weight" for group in groups for name in group}
            full = {
                name: self.read(name, device).float() if name in weights else self.read(name)
                for name in sorted(self.tensors.names())
                if name.startswith(prefix)
            }
        self.held.held = dict(full)
        with self.model.block(index):
            self.held.held = {}
            block = Block(
                self.model, index, full, groups, self.formats, self.scheme, self.methods, self.num_tokens, self.seconds
            )
            self.codes(block, streams)
            with self.seconds.of("write"):
                return block.save(self.out, block_file(index), _stem(index)) if self.writes else 0.0

    def codes(self, block: Block, streams: Streams | None) -> None:
        """Transform, ranges and codes of one block; the streams move behind it."""
        index = block.index
        if streams is None:
            for group in block.groups:
                block.quantize(group, None)
            return
        if self.whole_block:
            streams.advance(index, "parent")  # before anything changes in the module
        name = "quantized" if self.prefix else "parent"
        # statistics that can be brought in line with a transform are gathered in one pass with those it needs
        together = bool(self.transform_needs) and not self.prefix and "histogram" not in self.needs
        if self.transform_needs and not together:
            block.transform(streams.watch(index, name, self.transform_needs, move=False))
        if self.whole_block:
            stats = streams.watch(index, name, self.needs, move=False)
            block.quantize_whole(stats, partial(self.model.run_block, index), streams.streams, self.seed + index)
        with streams.recording(self.scheme.kv_cache is not None) as recorder:
            if self.whole_block:
                streams.advance(index, name)
            elif self.prefix:
                streams.in_order(index, name, self.needs, block.quantize)
            else:
                needs = self.needs | self.transform_needs if together else self.needs
                stats = streams.watch(index, name, needs, move=True)
                if together:
                    block.transform(stats)
                for group in block.groups:
                    block.quantize(group, stats[group[0]])
        if recorder:
            block.scale_cache(recorder)


def _stem(index: int) -> str:
    return f"block-{index:05d}"


class _Held:
    """The parent, but for tensors of one block that are in memory already."""

    def __init__(self, parent: Tensors) -> None:
        self.parent, self.held = parent, dict[str, Tensor]()

    def names(self) -> list[str]:
        return self.parent.names()

    def get(self, name: str) -> Tensor:
        return self.held[name] if name in self.held else self.parent.get(name)
