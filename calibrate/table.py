"""layers.csv: what quantization did to each linear. No times in it, so that equal results are equal bytes.

layer, format, range, round   what was done
clip_ratio                    mean of its scales over those of RTN
error, error_rtn              sum (W_q - W)^2 / sum W^2, ours and RTN's
weighted_error, ..._rtn       the same with each input weighted by its second moment; empty when no inputs were seen
bias_change                   largest change of its bias by the 16-bit grid; empty without a bias
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from torch import Tensor

from calibrate.inputs import InputStats
from calibrate.range import max as widest
from calibrate.round import nearest
from calibrate.rows import at, each
from qat.quant import Quantized, dequantize
from qat.scheme import TensorFormat

TABLE = "layers.csv"
ERRORS = ("error_rtn", "error", "weighted_error_rtn", "weighted_error")
COLUMNS = ("layer", "format", "range", "round", "clip_ratio", *ERRORS, "bias_change")


def rtn(weight: Tensor, fmt: TensorFormat) -> Quantized:
    """Round to nearest with nothing clipped: the baseline. weight: float32 (N, K)."""
    scale, zero = widest.find(weight, fmt, None, widest.Options())
    return nearest.codes(weight, scale, zero, fmt, None, nearest.Options())


def line(
    name: str, weight: Tensor, fmt: TensorFormat, q: Quantized, inputs: InputStats | None, bias_change: float | None
) -> dict[str, Any]:
    """The numbers of one linear. weight: float32 (N, K), the parent's."""
    plain = rtn(weight, fmt)
    found: dict[str, Any] = {
        "layer": name,
        "format": str(fmt),
        "clip_ratio": (q.scale / plain.scale).mean().item(),
        "error_rtn": _relative(plain, weight, fmt, None),
        "error": _relative(q, weight, fmt, None),
        "bias_change": bias_change,
    }
    if inputs is not None and inputs.second_moment is not None:
        found["weighted_error_rtn"] = _relative(plain, weight, fmt, inputs.second_moment)
        found["weighted_error"] = _relative(q, weight, fmt, inputs.second_moment)
    return found


def _relative(q: Quantized, weight: Tensor, fmt: TensorFormat, importance: Tensor | None) -> float:
    def energy(x: Tensor) -> float:
        return (x.square() if importance is None else x.square() * importance).sum().item()

    def of(rows: slice) -> tuple[float, float]:
        part = Quantized(q.codes[rows], at(q.scale, rows, fmt.scale_rows), at(q.zero, rows))
        return energy(dequantize(part, fmt) - weight[rows]), energy(weight[rows])

    lost, total = map(sum, zip(*each(weight, of, unit=fmt.scale_rows), strict=True))
    return lost / (total or 1.0)


def write(rows: list[dict[str, Any]], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


def join(parts: list[Path], out: Path) -> list[dict[str, str]]:
    """Put the tables of all blocks into one, and remove them; returns its rows, also when that was done before."""
    if all(part.exists() for part in parts):
        write([row for part in parts for row in read(part)], out.with_name(out.name + ".part"))
        out.with_name(out.name + ".part").replace(out)
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
