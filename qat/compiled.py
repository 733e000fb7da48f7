"""What lies between the linears of a block (norms, rotary embedding, activation, residuals) in fused kernels.

torch.compile takes a block's own code apart at every `CompensatedLinear`, whose backward adds to buffers in place, and
makes one kernel of each run of elementwise operations in between: fewer passes over activations, and fewer of them kept
for backward. Kernels do not round to 16 bits in between, so results differ as roundings do. Blocks share what is
compiled; validation runs the plain code.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext

import torch

from qat.fakequant import CompensatedLinear
from qat.model import Model

PAYS = 5e16  # FLOPs of a training that compilation shortens by more than it takes: 90 s on one H200 (benchmarks/LOG.md)


def pays(model: Model, tokens: int) -> bool:
    """Whether training on so many tokens is long enough: 8 FLOPs for each weight, of which 2 are the parent's."""
    linears = (model.root.get_submodule(name) for name in model.in_features)
    return 8 * tokens * sum(linear.in_features * linear.out_features for linear in linears) > PAYS


def refusal(learn: Collection[str], sharded: bool = False) -> str | None:
    """Why this training cannot be compiled, or None."""
    if sharded:
        return "weights that are split over ranks come and go in a block's forward pass"
    if "norm" in learn:
        return "learned norms are each a class of their own to torch.compile"
    named = os.environ.get("CC")
    if not any(shutil.which(name) for name in ([named] if named else ["cc", "gcc", "clang"])):
        return "torch.compile needs a C compiler, and neither cc, gcc nor clang is installed"
    return None


def compile_blocks(*models: Model) -> None:
    """Let the blocks of each model that are in memory run compiled."""
    torch.compiler.reset()  # it compiles a piece of code for few shapes only; an earlier stage may have used them up
    for model in models:
        for block in model.blocks:
            if next(block.parameters()).is_meta:  # freed: its outputs are on disk
                continue
            for module in block.modules():
                if isinstance(module, CompensatedLinear):
                    module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
            block.forward = torch.compile(block.forward, dynamic=False)


def plain(compiled: bool) -> AbstractContextManager[object]:
    """In this context blocks run their own code, as if they had not been compiled."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
