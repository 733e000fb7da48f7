"""Roundings and clips of a whole block are learned, so that its output comes close to the parent's.

As in SignRound (Cheng et al. 2023): each weight gets an offset before it is rounded, each group a factor on its scale,
and both follow the gradient of the squared error of the block's output, straight through the rounding, at a rate that
falls to 0. Inputs come from the part of the model that is quantized already, targets from the parent, so that a block
also makes up for the ones before it. Where we differ:

- Steps are Adam's (Kingma and Ba 2015) instead of the sign of the gradient: a weight whose gradient keeps changing sign
  stays where it is.
- The error of each token is taken relative to the mean square of its target, as the next block's norm will: else the
  first token of a window, hundreds of times larger than others, would be most of the loss.
- Scales may grow as well as shrink, and lie on the 16-bit grid while they are learned.

What is returned is the start, nearest codes in the range given, unless the loss over all windows came out smaller.
"""

from __future__ import annotations

import math

from pydantic import Field, model_validator

from calibrate.round._learned_loss import Windows
from calibrate.round._learned_weights import Weights
from calibrate.task import BlockTask
from qat.quant import Quantized
from qat.scheme import Section

VERSION = 1
NEEDS: set[str] = set()
DTYPES = {"int4", "int8"}
PREFIX = True


class Options(Section):
    """steps, batch: how often the weights move, and windows that each move looks at. rate: how far an offset can go
    in all steps, in codes, at a gradient of constant sign; scale_rate: likewise the relative change of a scale.
    window: the largest offset; codes beyond the nearest two come within reach over 0.5. shrink, grow: bounds of the
    factor on a scale. checks: how often, evenly spread, all windows are looked at to keep the best so far."""

    steps: int = Field(200, ge=1)
    batch: int = Field(8, ge=1)
    rate: float = Field(0.5, gt=0)
    scale_rate: float = Field(0.5, ge=0)
    window: float = Field(0.5, gt=0, le=1)
    shrink: float = Field(0.5, gt=0, le=1)
    grow: float = Field(1.25, ge=1)
    checks: int = Field(1, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Options:
        if self.checks > self.steps:
            raise ValueError(f"checks {self.checks} of {self.steps} steps: there is at most one check a step")
        return self


def block(task: BlockTask, options: Options) -> dict[str, Quantized]:
    """Codes of all linears of a block, by name. The modules' weights are left replaced (`BlockTask.linears`).

    Raises ValueError when the loss of the start is not finite.
    """
    windows = Windows(task)
    weights = Weights(task, task.inputs[0].dtype)
    parts = list(weights.parts.values())
    stretches = (options.shrink, options.grow)

    def judge() -> float:
        for part in parts:
            part.write()
        return windows.mean()

    def keep() -> None:
        for part in parts:
            part.keep()

    best = judge()
    if not math.isfinite(best):
        raise ValueError(
            f"the block's error against the parent is {best} before anything is learned; set compute.dtype to bfloat16 "
            "or float32"
        )
    keep()
    for number, chosen in enumerate(windows.draw(options.steps, options.batch, task.seed)):
        for part in parts:
            part.write()
        windows.backward(chosen, [part.grad for part in parts])
        share = 2 * (1 - number / options.steps) / options.steps  # of the whole way; about 1 in all
        for part in parts:
            part.step(number + 1, share * options.rate, share * options.scale_rate, options.window, stretches)
        if (number + 1) * options.checks // options.steps > number * options.checks // options.steps:
            loss = judge()
            if loss < best:
                best = loss
                keep()
    return weights.kept()
