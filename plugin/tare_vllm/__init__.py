"""Biases for linears that vLLM's model classes give none: the quantization method `tare` around a stock one."""

__version__ = "0.1.0"


def register() -> None:
    """Make `tare` known to vLLM; it calls this in every process, by the entry point `vllm.general_plugins`."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    if "tare" not in QUANTIZATION_METHODS:
        from tare_vllm.method import TareConfig

        register_quantization_config("tare")(TareConfig)
