"""One forward pass of a block that stops before each group of linears, so that the group can be quantized first.

All batches come to the first group; its statistics are complete, it is quantized, and they go on, with the quantized
weights, to the next ("true-sequential" GPTQ). Each linear is computed once. A stopped batch holds what the rest of its
block needs; where that would be too much memory, batches do not stop but start the block anew for every group. Both
ways compute the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from greenlet import getcurrent, greenlet
from torch import Tensor, nn


class _Reached(Exception):
    """Leaves a forward pass at the group it was for."""


@dataclass(frozen=True)
class Passage:
    """What happens on the way through one block.

    forwards: gives the block's output for one batch. groups: the module of each group that is called first, in the
    order they run; a batch may leave some out (experts). see(group, batch, input): what a batch brings to a group.
    ready(group): all batches have; quantize it now. done(batch, output).
    """

    forwards: Sequence[Callable[[], Tensor]]
    groups: Sequence[nn.Module]
    see: Callable[[int, int, Tensor], None]
    ready: Callable[[int], None]
    done: Callable[[int, Tensor], None]

    def run(self, hold: bool = True) -> None:
        """Take every batch through the block. hold: let stopped batches wait in memory."""
        (self._held if hold else self._replayed)()

    def _held(self) -> None:
        main = getcurrent()

        def stop(group: int) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
                main.switch((group, args[0]))

            return hook

        handles = [module.register_forward_pre_hook(stop(group)) for group, module in enumerate(self.groups)]
        workers = [greenlet(forward) for forward in self.forwards]
        try:
            stops = [worker.switch() for worker in workers]
            for group in range(len(self.groups)):
                here = [i for i, worker in enumerate(workers) if not worker.dead and stops[i][0] == group]
                for batch in here:
                    self.see(group, batch, stops[batch][1])
                    stops[batch] = (group, None)
                self.ready(group)
                for batch in here:
                    stops[batch] = workers[batch].switch()
            for batch, worker in enumerate(workers):
                assert worker.dead, "a group of linears ran twice, or out of order"
                self.done(batch, stops[batch])
                stops[batch] = None
        finally:
            for handle in handles:
                handle.remove()

    def _replayed(self) -> None:
        for group, module in enumerate(self.groups):
            for batch, forward in enumerate(self.forwards):

                def hook(_: nn.Module, args: tuple[Tensor, ...], group: int = group, batch: int = batch) -> None:
                    self.see(group, batch, args[0])
                    raise _Reached

                handle = module.register_forward_pre_hook(hook)
                try:
                    forward()
                except _Reached:
                    pass
                finally:
                    handle.remove()
            self.ready(group)
        for batch, forward in enumerate(self.forwards):
            self.done(batch, forward())
