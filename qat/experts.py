"""Mixtures of experts with one linear per expert and projection, named as in hub checkpoints and engines.

transformers 5 stacks all experts of a block into two three-dimensional parameters while it loads, which no hook can
watch one by one. Here that module gives way to one that computes the same from ordinary linears.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qat.arch import Arch


class Expert(nn.Module):
    """down(activation(gate(x)) * up(x)); the three linears have the names `gate_up_down`."""

    def __init__(
        self, hidden: int, inner: int, gate_up_down: tuple[str, str, str], activation: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.names, self.activation = gate_up_down, activation
        for name, (inputs, outputs) in zip(gate_up_down, [(hidden, inner)] * 2 + [(inner, hidden)], strict=True):
            self.add_module(name, nn.Linear(inputs, outputs, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (self.get_submodule(name) for name in self.names)
        y: Tensor = down(self.activation(gate(x)) * up(x))
        return y


class Experts(nn.ModuleList):
    """Experts by number. One that no token was sent to does not run, so its linears fire no hooks."""

    def forward(self, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """hidden: (tokens, K). chosen, shares: (tokens, k), the router's experts and their weights. Gives (tokens, K).

        An expert sees its tokens as (its tokens, K), those that chose it first before those that chose it second.
        """
        out = torch.zeros_like(hidden)
        for number in chosen.unique().tolist():
            place, token = torch.where(number == chosen.T)
            part = self[number](hidden[token]) * shares[token, place, None]
            out.index_add_(0, token, part.to(out.dtype))
        return out


def split_experts(block: nn.Module, arch: Arch) -> None:
    """Name the modules of a transformers block as checkpoints do, and replace stacked experts by `Experts`.

    arch: as the block has it (`Arch.at`). New linears are on the device, and in the dtype, of the stacked ones.
    """
    for name, attribute in arch.renamed.items():
        if attribute in block._modules:
            module = block._modules.pop(attribute)
            block.add_module(name, module)
            block.__dict__[attribute] = module  # transformers' forward still finds it, without a second name for it
    if arch.experts is None:
        return
    owner, _, leaf = arch.experts.rpartition(".")
    stacked: Any = block.get_submodule(arch.experts)
    count, hidden, inner = stacked.down_proj.shape
    with torch.device(stacked.down_proj.device):
        experts = [Expert(hidden, inner, arch.gate_up_down, stacked.act_fn) for _ in range(count)]
    setattr(block.get_submodule(owner), leaf, Experts(experts).to(stacked.down_proj.dtype).train(stacked.training))
