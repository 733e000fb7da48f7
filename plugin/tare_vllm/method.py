"""The quantization method `tare`: a stock method, and `X.comp_bias` of the linears that config.json lists.

vLLM's linears register `bias` after their method has created its weights, so the parameter needs a name of its own
until the files are read. It becomes the linear's bias just before the stock method prepares its kernels, so that
whatever that does with a bias (Marlin permutes it, row-parallel linears add it on rank 0) happens to this one too.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.utils import set_weight_attrs

BASES = ("awq", "gptq", "compressed-tensors")
FUSED = {  # vLLM's linear -> those that checkpoints have in its place
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


class WithBias:
    """Mixed into a stock linear method: `comp_bias` beside its weights. tare_parts: how many the files must hold."""

    tare_parts: int

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        super().create_weights(*args, **kwargs)  # type: ignore[misc]
        layer = kwargs["layer"] if "layer" in kwargs else args[0]
        rows = sum(layer.output_partition_sizes)
        bias = torch.nn.Parameter(torch.zeros(rows, dtype=layer.params_dtype), requires_grad=False)
        layer.tare_loaded = 0

        def load(parameter: torch.nn.Parameter, value: torch.Tensor, *shard: Any) -> None:
            layer.weight_loader(parameter, value, *shard)
            layer.tare_loaded += 1

        set_weight_attrs(bias, {"output_dim": 0, "weight_loader": load})
        layer.register_parameter("comp_bias", bias)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if layer.tare_loaded != self.tare_parts:
            raise ValueError(
                f"the checkpoint has {layer.tare_loaded} comp_bias for {layer.prefix}, its config.json lists "
                f"{self.tare_parts}; the directory is not whole: export or copy it again"
            )
        bias = layer.comp_bias.data
        del layer.comp_bias
        if layer.bias is None:
            layer.bias = torch.nn.Parameter(bias, requires_grad=False)
        else:
            layer.bias.data += bias
        super().process_weights_after_loading(layer)  # type: ignore[misc]


class TareConfig(QuantizationConfig):
    """`quantization_config` with quant_method tare: `base`, a stock one, and `comp_bias`, linears of a block."""

    def __init__(self, base: QuantizationConfig, linears: list[str]) -> None:
        self.base, self.linears = base, set(linears)  # before the parent, which sets packed_modules_mapping
        super().__init__()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TareConfig:
        """Raises ValueError for a base that is not known and for experts."""
        method, linears = config["base"]["quant_method"], config["comp_bias"]
        if method not in BASES:
            raise ValueError(f"tare around {method!r} is not known; export one of {', '.join(BASES)}")
        experts = [name for name in linears if ".experts." in name]
        if experts:
            raise ValueError(f"{experts[0]}: experts have no bias in vLLM; export without it")
        return cls(get_quantization_config(method).from_config(config["base"]), linears)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        method = self.base.get_quant_method(layer, prefix)
        parts = self._parts(prefix)
        if isinstance(layer, LinearBase) and method is not None and parts:
            stock = type(method)  # its name is kept: vLLM chooses a weight loader by it
            carrying = object.__new__(type(stock.__name__, (WithBias, stock), {}))
            carrying.__dict__.update(method.__dict__, tare_parts=parts)
            return carrying
        return method

    def _parts(self, prefix: str) -> int:
        """How many linears of the checkpoint, with a comp_bias, make up the one of that name."""
        owner, _, leaf = prefix.rpartition(".")
        names = [f"{owner}.{part}" for part in (leaf, *FUSED.get(leaf, ()))]
        return sum(any(name.endswith("." + linear) for linear in self.linears) for name in names)

    # the rest is the base's
    @property
    def packed_modules_mapping(self) -> dict[str, list[str]]:
        return self.base.packed_modules_mapping

    @packed_modules_mapping.setter
    def packed_modules_mapping(self, value: dict[str, list[str]]) -> None:
        self.base.packed_modules_mapping = value

    @property
    def kv_cache_scheme(self) -> dict[str, Any] | None:
        return getattr(self.base, "kv_cache_scheme", None)

    @classmethod
    def get_name(cls) -> str:  # type: ignore[override]
        return "tare"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return self.base.get_supported_act_dtypes()

    @classmethod
    def get_min_capability(cls) -> int:
        return 75  # of the stock methods for int4; those for fp8 check theirs themselves

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def get_cache_scale_mapper(self) -> Any:  # type: ignore[override]
        return self.base.get_cache_scale_mapper()

    def get_checkpoint_weight_mapper(self) -> Any:  # type: ignore[override]
        return self.base.get_checkpoint_weight_mapper()

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        self.base.apply_vllm_mapper(hf_to_vllm_mapper)

    def maybe_update_config(self, *args: Any, **kwargs: Any) -> None:
        self.base.maybe_update_config(*args, **kwargs)
