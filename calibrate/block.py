"""One decoder block at work: its full-precision tensors, the module it runs in, and what is stored of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor, nn

from calibrate import table
from calibrate.inputs import InputStats
from calibrate.kv import KvRecorder
from calibrate.range import max as widest
from calibrate.round import nearest
from calibrate.rows import at
from calibrate.task import Batches, BlockTask
from qat.artifact import block_tensors, save_tensors, transform_file
from qat.model import Model
from qat.quant import Quantized, dequantize, to_grid
from qat.scheme import Scheme, Section, TensorFormat

FEW_TOKENS = 64  # a linear that saw fewer (an expert that is seldom chosen) is rounded without statistics


class Chosen(NamedTuple):
    """A plugin: its name, its module, its options."""

    name: str
    module: Any
    options: Section


class Seconds(dict[str, float]):
    """Wall time by what was done."""

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self[what] = self.get(what, 0.0) + time.perf_counter() - start


class Block:
    """Quantizes one block, group by group of linears that share an input.

    full: every tensor of the block by full name, covered weights float32 (N, K) on the device. groups: covered linears
    by shared input, full names. formats: of every covered linear of the model.
    """

    def __init__(
        self,
        model: Model,
        index: int,
        full: dict[str, Tensor],
        groups: list[list[str]],
        formats: Mapping[str, TensorFormat],
        scheme: Scheme,
        methods: Mapping[str, Chosen],
        num_tokens: int,
        seconds: Seconds,
    ) -> None:
        self.model, self.index, self.full, self.groups, self.formats = model, index, full, groups, formats
        self.scheme, self.methods, self.num_tokens, self.seconds = scheme, methods, num_tokens, seconds
        self.stored: dict[str, Tensor] = {}
        self.vectors: dict[str, Tensor] = {}
        self.rows: list[dict[str, Any]] = []
        self.times: list[dict[str, Any]] = []
        self.plain: dict[str, float | None] = {}  # weighted error of round-to-nearest before the transform

    @property
    def linears(self) -> dict[str, nn.Linear]:
        return {name: self.model.root.get_submodule(name) for group in self.groups for name in group}

    def transform(self, inputs: dict[str, InputStats]) -> None:
        """Rescale channels, in `full` and in the module."""
        method = self.methods["transform"]
        with self.seconds.of("table"):
            for name in self.linears:
                self.plain[name] = table.rtn_error(self.full[f"{name}.weight"], self.formats[name], inputs.get(name))
        with self.seconds.of("transform"):
            self.vectors = method.module.rescale(
                self.full, inputs, self.model.arch.at(self.index), self.scheme, method.options, self.model.config
            )
        if self.vectors:
            for name, value in self.full.items():
                put(self.model, name, value)

    def quantize(self, group: Sequence[str], stats: InputStats | None) -> float:
        """Choose ranges and codes of one group, store them, and put the quantized weights into the module."""
        treatment, before = self.treatment(stats), dict(self.seconds)
        ranges = self.ranges(group, stats, treatment)
        rounding = Chosen("nearest", nearest, nearest.Options()) if treatment else self.methods["round"]
        codes: dict[str, Quantized] = {}
        with self.seconds.of("round"), naming(", ".join(group)):
            for names in self._alike(group):
                codes |= self._round(rounding, names, [ranges[name] for name in names], stats)
        self._share_time(group, before)
        return self.store(group, ranges, codes, stats, treatment)

    def quantize_whole(
        self,
        stats: Mapping[str, InputStats],
        forward: Callable[[Tensor], Tensor],
        streams: Mapping[str, Batches],
        seed: int,
    ) -> None:
        """Let a rounding that looks at the whole block choose all codes; as `quantize` otherwise.

        streams: hidden states, "quantized" before the block and "parent" behind it.
        """
        groups = [group for group in self.groups if not self.treatment(stats[group[0]])]
        for group in self.groups:
            if group not in groups:
                self.quantize(group, stats[group[0]])
        if not groups:  # a block that the scheme skips, or without tokens
            return
        before = dict(self.seconds)
        ranges: dict[str, tuple[Tensor, Tensor | None]] = {}
        for group in groups:
            ranges |= self.ranges(group, stats[group[0]])
        linears = {name: linear for name, linear in self.linears.items() if name in ranges}
        weights = {name: self.full[f"{name}.weight"] for name in ranges}
        task = BlockTask(
            linears, weights, self.formats, ranges, stats, forward, streams["quantized"], streams["parent"], seed
        )
        method = self.methods["round"]
        with self.seconds.of("round"), torch.enable_grad():
            codes = method.module.block(task, method.options)
        self._share_time(list(ranges), before)
        for group in groups:
            self.store(group, ranges, codes, stats[group[0]])

    def _share_time(self, names: Sequence[str], before: Mapping[str, float]) -> None:
        spent = {
            what: (self.seconds.get(what, 0.0) - before.get(what, 0.0)) / len(names) for what in ("range", "round")
        }
        self.times += [{"layer": name, **{what: f"{t:.4f}" for what, t in spent.items()}} for name in names]

    def treatment(self, stats: InputStats | None) -> str:
        """What the table says of linears without enough tokens: they are rounded to nearest at the widest range."""
        if stats is None or stats.num_tokens >= min(FEW_TOKENS, self.num_tokens):
            return ""
        return f"max, nearest: {stats.num_tokens} tokens seen"

    def _alike(self, group: Sequence[str]) -> list[list[str]]:
        """The linears of a group whose rows can be rounded together: of one integer format."""
        if not self.formats[group[0]].is_int:
            return [[name] for name in group]
        by_format: dict[TensorFormat, list[str]] = {}
        for name in group:
            by_format.setdefault(self.formats[name], []).append(name)
        return list(by_format.values())

    def _round(
        self, method: Chosen, names: list[str], ranges: list[tuple[Tensor, Tensor | None]], stats: InputStats | None
    ) -> dict[str, Quantized]:
        weights = [self.full[f"{name}.weight"] for name in names]
        rows = [len(weight) for weight in weights]
        zeros = [zero for _, zero in ranges if zero is not None]
        scale, zero = torch.cat([scale for scale, _ in ranges]), torch.cat(zeros) if zeros else None
        q = method.module.codes(torch.cat(weights), scale, zero, self.formats[names[0]], stats, method.options)
        starts = [sum(rows[:number]) for number in range(len(rows))]
        parts = {name: slice(start, start + n) for name, start, n in zip(names, starts, rows, strict=True)}
        return {name: Quantized(q.codes[part], own(q.scale, part), own(q.zero, part)) for name, part in parts.items()}

    def ranges(
        self, group: Sequence[str], stats: InputStats | None, treatment: str = ""
    ) -> dict[str, tuple[Tensor, Tensor | None]]:
        """One range per linear; linears that the engines fuse share a per-tensor scale."""
        method = Chosen("max", widest, widest.Options()) if treatment else self.methods["range"]
        find, weights = method.module.find, [self.full[f"{name}.weight"] for name in group]
        with self.seconds.of("range"), naming(", ".join(group)):
            if self.formats[group[0]].per == "tensor":
                scale, zero = find(torch.cat(weights), self.formats[group[0]], stats, method.options)
                return {name: (scale.clone(), zero) for name in group}  # safetensors takes no two names for one memory
            pairs = zip(group, weights, strict=True)
            return {name: find(weight, self.formats[name], stats, method.options) for name, weight in pairs}

    def store(
        self,
        group: Sequence[str],
        ranges: Mapping[str, tuple[Tensor, Tensor | None]],
        codes: Mapping[str, Quantized],
        stats: InputStats | None,
        treatment: str = "",
    ) -> float:
        """Keep the codes and make the module compute with them; returns the mean relative error of the weights."""
        used = ("max", "nearest") if treatment else (self.methods["range"].name, self.methods["round"].name)
        for name in group:
            weight, fmt, q = self.full.pop(f"{name}.weight"), self.formats[name], codes[name]
            bias = self.full.pop(f"{name}.bias", None)
            with naming(f"{name}.bias"):
                on_grid = None if bias is None else to_grid(bias.float())
            self.stored.update(block_tensors(name, q, self._input_scale(stats), on_grid))
            put(self.model, f"{name}.weight", dequantize(q, fmt))
            if on_grid is not None:
                put(self.model, f"{name}.bias", on_grid)
            with self.seconds.of("table"):
                row = table.line(name, weight, fmt, q, ranges[name], stats, self.plain.get(name), used[0] == "max")
            change = None if bias is None or on_grid is None else (on_grid - bias.float()).abs().max().item()
            row |= {"range": used[0], "round": used[1], "bias_change": change, "treatment": treatment}
            self.rows.append(row)
        return sum(row["error"] for row in self.rows[-len(group) :]) / len(group)

    def _input_scale(self, stats: InputStats | None) -> Tensor | None:
        if self.scheme.inputs is None or self.scheme.inputs.dynamic:
            return None
        assert stats is not None and stats.histogram is not None
        method = self.methods["inputs"]
        if not stats.histogram.num_samples:  # an expert that was never chosen; it takes that of the others
            return torch.zeros(1)
        return method.module.find_input(stats.histogram, self.scheme.inputs, method.options)

    def scale_cache(self, recorder: KvRecorder) -> None:
        """Static scales of the block's part of the KV cache."""
        assert self.scheme.kv_cache is not None
        method = self.methods["inputs"]
        with self.seconds.of("range"):
            (found,) = recorder.scales(method.module.find_input, self.scheme.kv_cache, method.options).values()
        attention = f"{self.model.arch.blocks}.{self.index}.self_attn"
        self.stored |= {f"{attention}.{name}": scale for name, scale in found._asdict().items()}

    def _share_input_scales(self) -> None:
        """One static input scale for all experts, as engines have it: the widest of those that saw enough tokens."""
        rare = {row["layer"] for row in self.rows if row["treatment"]}
        for names in self.model.arch.one_input_scale(self.index):
            known = [self.stored[f"{name}.input_scale"] for name in names if name not in rare and self._has_scale(name)]
            for name in filter(self._has_scale, names):
                if not known:
                    raise ValueError(f"{name}: no expert of its block saw enough tokens; give more calibration text")
                self.stored[f"{name}.input_scale"] = torch.stack(known).amax(0)

    def _has_scale(self, name: str) -> bool:
        return f"{name}.input_scale" in self.stored

    def save(self, out: Path, file: str, stem: str) -> float:
        """Write the block's file and its rows of the table; returns its mean relative error."""
        self._share_input_scales()
        if self.vectors:
            save_tensors(self.vectors, out / transform_file(self.index))
        table.write(self.rows, out / f"{stem}-{table.TABLE}")
        table.write(self.times, out / f"{stem}-{table.SECONDS}", table.SECONDS_COLUMNS)
        save_tensors({**self.full, **self.stored}, out / file)
        return sum(row["error"] for row in self.rows) / max(1, len(self.rows))


def put(model: Model, name: str, value: Tensor) -> None:
    """Make a tensor of the parent's checkpoint, by full name, a parameter of the loaded module."""
    owner, _, leaf = name.rpartition(".")
    setattr(model.root.get_submodule(owner), leaf, nn.Parameter(value.to(model.device, model.dtype), False))


@overload
def own(x: Tensor, rows: slice) -> Tensor: ...


@overload
def own(x: None, rows: slice) -> None: ...


def own(x: Tensor | None, rows: slice) -> Tensor | None:
    """A copy of the rows of a scale or zero point: safetensors takes no two names for one memory."""
    return None if x is None else at(x, rows).clone()


@contextmanager
def naming(what: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
