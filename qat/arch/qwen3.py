"""Qwen3: the Llama graph with a norm on every head of q and k, which no other class has, so it is never relabelled."""

from qat.arch import Arch, BiasSlots
from qat.arch.llama import ARCH as LLAMA
from qat.arch.llama import ATTENTION, MLP

QKV = ATTENTION[:3]

ARCH = Arch(
    model_types=("qwen3",),
    class_name="Qwen3ForCausalLM",
    linears=LLAMA.linears,
    shared_input=LLAMA.shared_input,
    norm_pairs=LLAMA.norm_pairs,
    bias_slots={
        # vLLM's o_proj never has a bias, transformers' has one with attention_bias; TensorRT-LLM obeys a flag for the
        # MLP that transformers does not know
        "vllm": BiasSlots(by_flag={"attention_bias": QKV}),
        "trtllm": BiasSlots(by_flag={"attention_bias": ATTENTION, "mlp_bias": MLP}),
        "transformers": BiasSlots(by_flag={"attention_bias": ATTENTION}),
    },
)
