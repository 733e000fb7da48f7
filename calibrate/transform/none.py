"""Nothing is rescaled.

Contract of a transform: `rescale` gets all that one block computes with, may multiply channels of weights, norms and
biases in place so that the block still computes the same function, brings `inputs` in line (an input divided by s has
its second moment divided by s^2), and returns the vectors it applied, named by what they multiplied, e.g.
`model.layers.0.input_layernorm.weight` or `model.layers.0.self_attn.q_proj.weight#in`. They are stored beside the
block, so that its full-precision weights can be had again from the parent.
"""

from __future__ import annotations

from torch import Tensor
from transformers import PretrainedConfig

from calibrate.inputs import InputStats
from qat.arch import Arch
from qat.scheme import Scheme, Section

VERSION = 1
NEEDS: set[str] = set()
DTYPES = {"int4", "int8", "fp8_e4m3"}


class Options(Section):
    """None."""


def rescale(
    weights: dict[str, Tensor],
    inputs: dict[str, InputStats],
    arch: Arch,
    scheme: Scheme,
    options: Options,
    config: PretrainedConfig,
) -> dict[str, Tensor]:
    """weights: all tensors of the block by full name. inputs: statistics by full name of each quantized linear."""
    return {}
