"""Outliers of the inputs are moved into the weights, so that both fit in 8 bits (SmoothQuant, Xiao et al. 2022).

For linears W behind a norm, equation 4 of the paper: inputs are divided, and columns of W multiplied, by

    s_j = max|x_j|^alpha / max_n|W[n, j]|^(1 - alpha)

over all linears that read the norm and all calibration tokens. The division is folded into the norm; linears behind
another linear are left alone, as in the paper. A channel without an input or a weight other than zero keeps s = 1.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor
from transformers import PretrainedConfig

from calibrate.inputs import InputStats
from calibrate.transform import _fold
from qat.arch import Arch
from qat.scheme import Scheme, Section

VERSION = 1
NEEDS = {"amax"}
DTYPES = {"int8", "fp8_e4m3"}
INPUTS = {"quantized"}  # there is nothing else to win


class Options(Section):
    """alpha: 0 evens out the weights, 1 the inputs. More than 0.5 helps models with strong outliers."""

    alpha: float = Field(0.5, ge=0, le=1)


def rescale(
    weights: dict[str, Tensor],
    inputs: dict[str, InputStats],
    arch: Arch,
    scheme: Scheme,
    options: Options,
    config: PretrainedConfig,
) -> dict[str, Tensor]:
    """See `calibrate.transform.none`. Raises ValueError when the scheme leaves inputs as they are."""
    if scheme.inputs is None:
        raise ValueError(
            "calibrate.transform: smoothquant makes inputs easier to quantize, and scheme.inputs is null; set it, or "
            "use awq or none"
        )
    vectors: dict[str, Tensor] = {}
    for pair in _fold.pairs(weights, inputs, arch, scheme, config):
        if not pair.is_norm:
            continue
        x = torch.stack([stats.amax for stats in pair.stats if stats.amax is not None]).amax(0)
        w = torch.stack([weights[f"{name}.weight"].abs().amax(0) for name in pair.formats]).amax(0)
        s = x**options.alpha / w ** (1 - options.alpha)
        s = torch.where((x > 0) & (w > 0), s, torch.ones_like(s))
        vectors |= _fold.fold(pair, weights, _fold.allowed(pair, weights, s))
    return vectors
