"""Nothing is rescaled.

Contract of a transform: `rescale` gets all that one block computes with, may multiply channels of weights, norms and
biases so that the block still computes the same function (it replaces entries of `weights`), brings `inputs` in line
(an input divided by s has its second moment divided by s^2), and returns the vectors it applied, named by what they
multiplied: `model.layers.0.input_layernorm.weight`, the columns of `model.layers.0.self_attn.q_proj.weight#in`, the
rows of `model.layers.0.self_attn.v_proj.weight#out`, or a bias. They are stored beside the block, so that its
full-precision weights can be had again from the parent (`calibrate.transform._fold.replay`).
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
INPUTS = {"plain", "quantized"}


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
    """The vectors (channels,) float32 by which a block was multiplied: none.

    weights: all tensors of the block by full name, those of quantized linears in float32. inputs: statistics by full
    name of each quantized linear; linears that share an input share one object. arch: as this block has it. config: of
    transformers.
    """
    return {}
