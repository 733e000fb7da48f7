"""What lies between the linears of a block (norms, rotary embedding, activation, residuals) in fused kernels.

torch.compile takes a block's own code apart at every `CompensatedLinear`, whose backward adds to buffers in place, and
makes one kernel of each run of elementwise operations in between: fewer passes over activations, and fewer of them kept
for backward. Kernels do not round to 16 bits in between, so results differ as roundings do. Blocks share what is
compiled; validation runs the plain code.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qat.fakequant import CompensatedLinear
from qat.model import Model
from qat.sections import not_compiled

GATED = ("gate_proj", "up_proj", "down_proj", "act_fn")
PAYS = 5e16  # FLOPs of a training that compilation shortens by more than it takes: 90 s on one H200 (benchmarks/LOG.md)


def pays(model: Model, tokens: int) -> bool:
    """Whether training on so many tokens is long enough: 8 FLOPs for each weight, of which 2 are the parent's."""
    linears = (model.root.get_submodule(name) for name in model.in_features)
    return 8 * tokens * sum(linear.in_features * linear.out_features for linear in linears) > PAYS


def refusal(learn: Collection[str], device: torch.device, sharded: bool = False, experts: bool = False) -> str | None:
    """Why a training on `device` cannot be compiled, or None. sharded: weights over ranks. experts: a mixture."""
    if sharded:
        return "weights that are split over ranks come and go in a block's forward pass"
    if experts:
        return "experts get another number of tokens in every step"
    if apart := not_compiled(learn):
        return f"train.learn has {' and '.join(apart)}, which torch.compile would compile again for each block"
    variable, names = ("CXX", ["g++"]) if device.type == "cpu" else ("CC", ["gcc", "clang"])
    compilers = [os.environ[variable]] if variable in os.environ else names
    if not any(shutil.which(name) for name in compilers):
        return f"torch.compile needs a compiler, and there is no {' or '.join(compilers)} ({variable})"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "torch.compile needs Python's headers (Python.h: python3-dev), which are not installed"
    return None


def compile_blocks(*models: Model) -> None:
    """Let the blocks of each model run compiled, but inside `plain`."""
    torch.compiler.reset()  # it compiles a piece of code for few shapes only; an earlier stage may have used them up
    for model in models:
        for block in model.blocks:
            for module in block.modules():
                if isinstance(module, CompensatedLinear):
                    module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
                elif all(hasattr(module, name) for name in GATED):
                    module.__class__ = _gated(type(module))  # type: ignore[arg-type]
            block.forward = torch.compile(block.forward, dynamic=False)


@cache
def _gated(kind: Any) -> Any:
    """The class of transformers' gated MLPs with both linears first: between them, the activation would be a kernel of
    its own, whose result is kept for backward, the widest tensor of a block. Blocks of one class share the kernels.
    """

    def forward(mlp: Any, x: Tensor) -> Tensor:
        gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        out: Tensor = mlp.down_proj(mlp.act_fn(gate) * up)
        return out

    return type(kind.__name__, (kind,), {"forward": forward})


def plain(compiled: bool) -> AbstractContextManager[object]:
    """In this context blocks run their own code, as if they had not been compiled."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
