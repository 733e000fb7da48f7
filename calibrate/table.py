"""layers.csv: what quantization did to each linear. Times are in seconds.csv, so that equal results are equal bytes.

layer, format, range, round   what was done
treatment                     what was done instead, for want of tokens; else empty
damping                       of the Hessian, where the rounding had to factor one
clip_ratio                    mean of its scales over those of RTN
error_rtn, _range, error      sum (W_q - W)^2 / sum W^2: of RTN, of the nearest codes in the chosen range, of what is
                              stored; all after the transform
weighted_error_...            the same errors of the output, (W_q - W) H (W_q - W)^T, with H = E[x x^T], or its diagonal
                              where no method asked for all of it; `plain` is RTN before the transform
bias_change                   largest change of its bias by the 16-bit grid; empty without a bias

seconds.csv: layer, range, round: wall time of the choices, shared out evenly over linears that were handled together.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from calibrate.inputs import InputStats
from calibrate.range import max as widest
from calibrate.round import nearest
from calibrate.rows import at, each
from qat import manifest
from qat.quant import Quantized, dequantize
from qat.scheme import TensorFormat

TABLE, SECONDS = "layers.csv", "seconds.csv"
ERRORS = (
    "error_rtn",
    "error_range",
    "error",
    "weighted_error_plain",
    "weighted_error_rtn",
    "weighted_error_range",
    "weighted_error",
)
SECONDS_COLUMNS = ("layer", "range", "round")
COLUMNS = ("layer", "format", "range", "round", "treatment", "damping", "clip_ratio", *ERRORS, "bias_change")


def rtn(weight: Tensor, fmt: TensorFormat) -> Quantized:
    """Round to nearest with nothing clipped: the baseline. weight: float32 (N, K)."""
    scale, zero = widest.find(weight, fmt, None, widest.Options())
    return nearest.codes(weight, scale, zero, fmt, None, nearest.Options())


def rtn_error(weight: Tensor, fmt: TensorFormat, inputs: InputStats | None) -> float | None:
    """Relative error of the output of round-to-nearest; None when nothing is known of the inputs."""
    importance = _importance(inputs)
    return None if importance is None else _relative(rtn(weight, fmt), weight, fmt, importance)


def line(
    name: str,
    weight: Tensor,
    fmt: TensorFormat,
    q: Quantized,
    chosen: tuple[Tensor, Tensor | None],
    inputs: InputStats | None,
    plain: float | None,
    unclipped: bool = False,
) -> dict[str, Any]:
    """The numbers of one linear. weight: float32 (N, K), the transformed parent's. chosen: scale and zero of its range.

    plain: `rtn_error` before the transform. unclipped: that range is the one of RTN, which then is not searched again.
    """
    importance = _importance(inputs)
    plain_rtn = nearest.codes(weight, *chosen, fmt, None, nearest.Options()) if unclipped else rtn(weight, fmt)
    states = {"rtn": plain_rtn, "range": plain_rtn, "": q}
    if not torch.equal(chosen[0], plain_rtn.scale) or not _same(chosen[1], plain_rtn.zero):
        states["range"] = nearest.codes(weight, *chosen, fmt, None, nearest.Options())
    found: dict[str, Any] = {"layer": name, "format": str(fmt)}
    found["clip_ratio"] = (q.scale / plain_rtn.scale).mean().item()
    known: dict[int, tuple[float, float | None]] = {}
    for state, values in states.items():
        if id(values) not in known:
            weighted = None if importance is None else _relative(values, weight, fmt, importance)
            known[id(values)] = _relative(values, weight, fmt, None), weighted
        end = f"_{state}" if state else ""
        found[f"error{end}"], found[f"weighted_error{end}"] = known[id(values)]
    found["weighted_error_plain"] = found["weighted_error_rtn"] if plain is None else plain
    found["damping"] = None if inputs is None else inputs.notes.get("damping")
    return found


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def _importance(inputs: InputStats | None) -> Tensor | None:
    """H (K, K), or its diagonal (K,)."""
    if inputs is None or not inputs.num_tokens:
        return None
    return inputs.hessian if inputs.hessian is not None else inputs.second_moment


def _relative(q: Quantized, weight: Tensor, fmt: TensorFormat, importance: Tensor | None) -> float:
    # of the cross terms three digits will do, at a fraction of the time
    hessian = importance.bfloat16() if importance is not None and importance.ndim == 2 else None

    def energy(x: Tensor) -> float:
        if hessian is not None:
            return ((x.bfloat16() @ hessian).float() * x).sum().item()
        return (x.square() if importance is None else x.square() * importance).sum().item()

    def of(rows: slice) -> tuple[float, float]:
        part = Quantized(q.codes[rows], at(q.scale, rows, fmt.scale_rows), at(q.zero, rows))
        return energy(dequantize(part, fmt) - weight[rows]), energy(weight[rows])

    lost, total = map(sum, zip(*each(weight, of, unit=fmt.scale_rows), strict=True))
    return lost / (total or 1.0)


def write(rows: list[dict[str, Any]], path: Path, columns: Sequence[str] = COLUMNS) -> None:
    with path.open("w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


def join(parts: list[Path], out: Path, columns: Sequence[str] = COLUMNS) -> list[dict[str, str]]:
    """Put the tables of all blocks into one, and remove them; returns its rows, also when that was done before."""
    if all(part.exists() for part in parts):
        with manifest.whole(out) as whole:
            write([row for part in parts for row in read(part)], whole, columns)
    for part in parts:
        part.unlink(missing_ok=True)
    return read(out)


def means(rows: list[dict[str, str]]) -> dict[str, float | None]:
    """The mean of each error over all linears, and the largest change of a bias."""
    found: dict[str, float | None] = {}
    for column in ERRORS:
        values = [float(row[column]) for row in rows if row[column]]
        found[column] = sum(values) / len(values) if values else None
    found["largest_bias_change"] = max((float(row["bias_change"]) for row in rows if row["bias_change"]), default=0.0)
    return found
