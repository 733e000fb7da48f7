"""Static scales of the KV cache: what a block hands to its cache is counted, and passed through unchanged.

transformers calls `cache.update(key_states, value_states, layer_idx)` after the norms of queries and keys and after
rotary embedding. Engines store keys in the same state: vLLM's attention layer gets q, k, v behind `rotary_emb`, and
TensorRT-LLM rotates in the kernel that writes the cache. Both store x / scale and read it back times scale.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from calibrate.histogram import Histogram
from qat.scheme import Section, TensorFormat

NAMES = ("cache", "past_key_values")  # of the argument: transformers from 5.2x on, and before


class KvScales(NamedTuple):
    """Of one layer's cache, each (1,) float32."""

    k_scale: Tensor
    v_scale: Tensor


class KvRecorder:
    """In the place of a cache: one histogram for the keys and one for the values of each layer, over all heads.

        model.blocks[i](hidden, **(kwargs | recorder.argument(model.blocks[i])))
        recorder.scales(max.find_input, scheme.kv_cache, options)[i].k_scale

    keys, values: by index of the layer.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.keys: dict[int, Histogram] = defaultdict(lambda: Histogram(device))
        self.values: dict[int, Histogram] = defaultdict(lambda: Histogram(device))

    def argument(self, block: nn.Module) -> dict[str, Any]:
        """The keyword argument that gives this recorder to a decoder block.

        Raises ValueError for a block that takes no cache.
        """
        known = inspect.signature(block.forward).parameters
        for name in NAMES:
            if name in known:
                return {name: self}
        raise ValueError(f"{type(block).__name__} takes none of {', '.join(NAMES)}; leave scheme.kv_cache out for it")

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Count the states (batch, heads, length, head size) of a layer and return them as they are."""
        self.keys[layer_idx].update(key_states)
        self.values[layer_idx].update(value_states)
        return key_states, value_states

    def reduce(self) -> None:
        """Put the counts of all ranks together; every rank has run the same layers."""
        for layer in sorted(self.keys):
            self.keys[layer].reduce()
            self.values[layer].reduce()

    def scales(
        self, find_input: Callable[[Histogram, TensorFormat, Any], Tensor], fmt: TensorFormat, options: Section
    ) -> dict[int, KvScales]:
        """Scales by layer. Raises ValueError, naming the layer, for what `find_input` refuses."""
        found = {}
        for layer in sorted(self.keys):
            try:
                pair = [find_input(side[layer], fmt, options) for side in (self.keys, self.values)]
            except ValueError as error:
                raise ValueError(f"KV cache of layer {layer}: {error}") from error
            found[layer] = KvScales(*pair)
        return found
