"""The block-by-block runner: reads a block of the parent, watches its inputs, quantizes it, writes it, moves on.

The calibration text runs through the parent itself, so a block never sees an earlier block's rounding. That makes an
interrupted run simple to continue: blocks whose file exists are only run forward.

In memory: one block, in the computing dtype while it runs and then in float32 while it is quantized, the statistics of
its inputs, and the activations of all windows, on the CPU: windows x length x hidden size x bytes of dtype.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from calibrate import check, sensitivity, table
from calibrate.inputs import InputStats
from qat import plugins
from qat.artifact import REST, block_file, block_tensors, check_finite, save_tensors, write_meta
from qat.checkpoint import SafetensorsFolder, Tensors
from qat.model import Model
from qat.parent import side_files
from qat.quant import max_scale, to_grid
from qat.scheme import Scheme, Section

QUESTIONS = ("transform", "range", "round")
TOKEN_WEIGHTS = "token-weights.safetensors"
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
    """Quantize a model into the artifact folder `out`; returns metrics.

    config, tensors: of the parent, whose other files (config, tokenizer, licence) lie in the folder `source`. windows:
    calibration token ids (num_windows, length) int64; None will do when no method looks at inputs. methods:
    `transform`, `range` and `round`. batch: windows that go through a block together. seed: for `kl`. progress: called
    with blocks done, blocks in all, relative error of the last one.

    Block files that `out` already holds are kept: hand the same folder to the same arguments only. Raises ValueError
    for what a person can mend: shapes, methods, budget, non-finite weights.
    """
    runner = _Runner(config, tensors, scheme, windows, methods, out, torch.device(device), dtype, batch)
    runner.prepare(seed, activation_bytes)
    out.mkdir(parents=True, exist_ok=True)
    reused = sum((out / block_file(index)).exists() for index in range(runner.num_blocks))
    if not (out / REST).exists():
        outside = [name for name in tensors.names() if not name.startswith(runner.model.arch.blocks + ".")]
        save_tensors({name: runner.read(name) for name in outside}, out / REST)
    runner.blocks(seed, activation_bytes, progress)
    for file in side_files(source):
        shutil.copyfile(file, out / file.name)
    rows = table.join([out / _table_file(index) for index in range(runner.num_blocks)], out / table.TABLE)
    (out / TOKEN_WEIGHTS).unlink(missing_ok=True)
    said = {question: {"name": m.name, **m.options.model_dump()} for question, m in methods.items()}
    write_meta(out, scheme, runner.formats, {"calibrate": said})
    return {
        "linears": len(rows),
        "tokens": runner.num_tokens,
        **table.means(rows),
        "blocks_reused": reused,
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
    ) -> None:
        self.tensors, self.scheme, self.windows, self.out, self.batch = tensors, scheme, windows, out, batch
        self.modules = {q: plugins.find(f"calibrate.{q}", methods[q].name) for q in QUESTIONS}
        self.methods = methods
        self.model = Model(config, tensors, device, dtype)
        self.num_blocks = len(self.model.blocks)
        self.seconds: dict[str, float] = {}
        self.token_weights: SafetensorsFolder | None = None

    @property
    def num_tokens(self) -> int:
        return self.windows.numel() if self.windows is not None and self.needs else 0

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - start

    def prepare(self, seed: int, activation_bytes: int) -> None:
        """Everything that can be refused without reading a weight."""
        self.formats = check.formats(self.model, self.scheme)
        check.methods(self.formats, {q: (self.methods[q].name, self.modules[q]) for q in QUESTIONS})
        self.static_inputs = self.scheme.inputs is not None and not self.scheme.inputs.dynamic
        needs = set[str]().union(*(module.NEEDS for module in self.modules.values()))
        needs |= {"amax"} if self.static_inputs else set()
        self.needs = frozenset(needs | {"second_moment"} if needs else needs)  # the table has a use for the latter
        if not self.needs:
            return
        if self.windows is None or not self.windows.numel():
            raise ValueError(f"calibration text is needed for {', '.join(sorted(needs))}; set data.calibration")
        count, length = self.windows.shape
        hidden, size = self.model.config.hidden_size, self.model.dtype.itemsize
        if (kept := count * length * hidden * size) > activation_bytes:
            raise ValueError(
                f"calibration activations take {kept / 2**30:.1f} GiB ({count} windows x {length} tokens x {hidden} x "
                f"{size} bytes), over the budget of {activation_bytes / 2**30:.1f} GiB; use at most "
                f"{activation_bytes // (length * hidden * size)} windows, or compute.dtype bfloat16"
            )

    def read(self, name: str) -> Tensor:
        """A tensor of the parent, on the CPU as stored. Raises ValueError for a NaN or infinity in it."""
        tensor = self.tensors.get(name)
        try:
            check_finite({name: tensor})
        except ValueError as error:
            raise ValueError(
                f"{error}: the parent's weights are damaged or diverged; fetch them again, or choose another revision"
            ) from error
        return tensor

    def groups(self, index: int) -> list[list[str]]:
        """The covered linears of a block by shared input, full names."""
        arch = self.model.arch
        full = [[f"{arch.blocks}.{index}.{name}" for name in group] for group in arch.shared_input]
        return [covered for group in full if (covered := [name for name in group if name in self.formats])]

    def blocks(self, seed: int, activation_bytes: int, progress: Callable[[int, int, float], None]) -> None:
        """Quantize every block that has no file yet."""
        todo = [index for index in range(self.num_blocks) if not (self.out / block_file(index)).exists()]
        states: list[Tensor] = []
        if todo and self.needs:
            assert self.windows is not None
            if "kl_hessian" in self.needs:
                self.weigh_tokens(seed, activation_bytes)
            with self.model.ends():
                states = [self.model.embed(ids).cpu() for ids in self.windows.split(self.batch)]
        for index in range(max(todo, default=-1) + 1):
            inputs: dict[str, InputStats] = {}
            if self.needs:
                with self.timed("forward"):
                    inputs = self.forward(index, states, watch=index in todo)
            if index in todo:
                error = self.quantize(index, inputs)
                progress(index + 1, self.num_blocks, error)

    def weigh_tokens(self, seed: int, activation_bytes: int) -> None:
        path = self.out / TOKEN_WEIGHTS
        if not path.exists():
            groups = [self.groups(index) for index in range(self.num_blocks)]
            assert self.windows is not None
            with self.timed("sensitivity"):
                found = sensitivity.token_weights(self.model, self.windows, groups, seed, self.batch, activation_bytes)
            save_tensors(found, path)
        self.token_weights = SafetensorsFolder(self.out, [TOKEN_WEIGHTS])

    @torch.no_grad()
    def forward(self, index: int, states: list[Tensor], watch: bool) -> dict[str, InputStats]:
        """Run all batches through a block, in place. Returns statistics by the name of each covered linear."""
        stats: dict[str, InputStats] = {}
        with self.model.block(index):
            handles = []
            batch_weights: dict[str, Tensor] = {}
            for group in self.groups(index) if watch else []:
                linear = self.model.root.get_submodule(group[0])
                shared = InputStats(self.needs, linear.in_features, self.model.device)
                stats.update(dict.fromkeys(group, shared))
                handles.append(linear.register_forward_pre_hook(_watch(shared, group[0], batch_weights)))
            kept = [name for name in (self.token_weights.names() if self.token_weights else ()) if name in stats]
            weights = {name: self.token_weights.get(name) for name in kept} if self.token_weights else {}
            for number, state in enumerate(states):
                rows = slice(number * self.batch, (number + 1) * self.batch)
                batch_weights.update({name: w[rows].to(self.model.device) for name, w in weights.items()})
                states[number] = self.model.run_block(index, state.to(self.model.device)).cpu()
                if not torch.isfinite(states[number]).all():
                    for name in (n for n in self.tensors.names() if n.startswith(f"{self.model.arch.blocks}.{index}.")):
                        self.read(name)  # a weight that is not finite is the likelier cause: it is named here
                    raise ValueError(
                        f"block {index} gives non-finite values on the calibration text in {self.model.dtype}; "
                        "set compute.dtype to bfloat16 or float32"
                    )
            for handle in handles:
                handle.remove()
        return stats

    def quantize(self, index: int, inputs: dict[str, InputStats]) -> float:
        """Write a block's file and its rows of the table; returns its mean relative error."""
        prefix, device = f"{self.model.arch.blocks}.{index}.", self.model.device
        block = {name: self.read(name) for name in sorted(self.tensors.names()) if name.startswith(prefix)}
        for name in [name for group in self.groups(index) for name in group]:
            block[f"{name}.weight"] = block[f"{name}.weight"].to(device, torch.float32)
        transform, round_ = self.modules["transform"], self.modules["round"]
        with self.timed("transform"):
            vectors = transform.rescale(block, inputs, self.model.arch, self.scheme, self.methods["transform"].options)
        if vectors:
            save_tensors(vectors, self.out / f"transform-{index:05d}.safetensors")
        named = {question: self.methods[question].name for question in ("range", "round")}
        rows: list[dict[str, Any]] = []
        stored: dict[str, Tensor] = {}
        for group in self.groups(index):
            with self.timed("range"), _naming(", ".join(group)):
                ranges = self.ranges(group, [block[f"{name}.weight"] for name in group], inputs.get(group[0]))
            for name, (scale, zero) in zip(group, ranges, strict=True):
                weight, fmt, seen = block.pop(f"{name}.weight"), self.formats[name], inputs.get(name)
                with self.timed("round"):
                    q = round_.codes(weight, scale, zero, fmt, seen, self.methods["round"].options)
                bias = block.pop(f"{name}.bias", None)
                with _naming(f"{name}.bias"):
                    on_grid = None if bias is None else to_grid(bias.float())
                input_scale = None
                if self.static_inputs:
                    assert self.scheme.inputs is not None and seen is not None and seen.amax is not None
                    input_scale = max_scale(seen.amax.amax().view(1), self.scheme.inputs)
                stored.update(block_tensors(name, q, input_scale, on_grid))
                with self.timed("table"):
                    change = None if bias is None or on_grid is None else (on_grid - bias.float()).abs().max().item()
                    rows.append(named | table.line(name, weight, fmt, q, seen, change))
        table.write(rows, self.out / _table_file(index))
        save_tensors({**block, **stored}, self.out / block_file(index))
        return sum(row["error"] for row in rows) / max(1, len(rows))

    def ranges(
        self, group: list[str], weights: list[Tensor], inputs: InputStats | None
    ) -> list[tuple[Tensor, Tensor | None]]:
        """One range per linear; linears that the engines fuse share a per-tensor scale."""
        find, options = self.modules["range"].find, self.methods["range"].options
        if self.formats[group[0]].per == "tensor":
            scale, zero = find(torch.cat(weights), self.formats[group[0]], inputs, options)
            return [(scale.clone(), zero) for _ in group]  # safetensors takes no two names for one memory
        return [find(w, self.formats[name], inputs, options) for name, w in zip(group, weights, strict=True)]


@contextmanager
def _naming(what: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


def _watch(stats: InputStats, name: str, weights: dict[str, Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        stats.update(args[0], weights.get(name))

    return hook


def _table_file(index: int) -> str:
    return f"block-{index:05d}.csv"
