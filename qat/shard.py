"""Frozen weights split over the ranks (FSDP2), for models that one device does not hold.

Only the blocks' frozen weights are split, by rows, and gathered block by block while they are used. What is learned is
small and on every rank; its gradients are averaged by hand, in float32, like without splitting. Embedding, final norm
and head stay whole. So none of FSDP's rules for trainable parameters (one dtype, its mixed precision) applies.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from qat.fakequant import CompensatedLinear


class Shard:
    """Called with the number of a block and the block, when its weights are in: splits them over `mesh` (one axis).

    learned_norms: whether norms are learned; they then stay whole.
    """

    def __init__(self, mesh: DeviceMesh, learned_norms: bool = False) -> None:
        self.mesh, self.learned_norms = mesh, learned_norms

    def __call__(self, index: int, block: nn.Module) -> None:
        whole = {p for p in block.parameters() if p.dim() == 1} if self.learned_norms else None
        fully_shard(block, mesh=self.mesh, reshard_after_forward=True, ignored_params=whole)
        for module in block.modules():
            if isinstance(module, CompensatedLinear):
                module.keep_rows(rows_of(len(module.weight), self.mesh.get_local_rank(), self.mesh.size()))


def rows_of(rows: int, rank: int, world: int) -> slice:
    """The rows that a rank holds: equal chunks, the last ones shorter or empty, as torch.chunk gives them."""
    chunk = -(-rows // world)
    return slice(min(rows, rank * chunk), min(rows, (rank + 1) * chunk))


def whole(weight: Tensor) -> Tensor:
    """A weight as every rank sees it; a collective call when it is split."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight
