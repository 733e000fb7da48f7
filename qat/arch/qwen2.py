"""Qwen2 and Qwen2.5: the Llama graph with biases on q, k and v that are always there."""

from qat.arch import Arch, BiasSlots
from qat.arch.llama import ARCH as LLAMA
from qat.arch.llama import ATTENTION, MLP

QKV = ATTENTION[:3]

ARCH = Arch(
    model_types=("qwen2",),
    class_name="Qwen2ForCausalLM",
    linears=LLAMA.linears,
    shared_input=LLAMA.shared_input,
    norm_pairs=LLAMA.norm_pairs,
    bias_slots={
        "vllm": BiasSlots(always=QKV),
        "trtllm": BiasSlots(always=QKV, by_flag={"mlp_bias": MLP}),
        "trtllm_legacy": BiasSlots(),  # not written for it under that name
        "transformers": BiasSlots(always=QKV),
    },
    relabel_to="llama",
    relabel_when={"use_sliding_window": False},
    relabel_fields={"attention_bias": True, "mlp_bias": False},
)
