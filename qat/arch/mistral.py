"""Mistral: the Llama graph. Without a sliding window it can be relabelled as Llama, whose slots every engine loads."""

from qat.arch import Arch, BiasSlots
from qat.arch.llama import ARCH as LLAMA
from qat.arch.llama import SLOTS

ARCH = Arch(
    model_types=("mistral",),
    class_name="MistralForCausalLM",
    linears=LLAMA.linears,
    shared_input=LLAMA.shared_input,
    norm_pairs=LLAMA.norm_pairs,
    # vLLM's Mistral reads Llama's flags; TensorRT-LLM's and transformers' have no bias at all.
    bias_slots={
        "vllm": SLOTS,
        "trtllm": BiasSlots(),
        "trtllm_legacy": BiasSlots(),
        "transformers": BiasSlots(),
    },
    relabel_to="llama",
    relabel_when={"sliding_window": None},
    relabel_fields={"attention_bias": False, "mlp_bias": False},
)
