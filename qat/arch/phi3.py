"""Phi-3, Phi-3.5 and Phi-4 (not MoE): the Llama graph with q, k, v in one linear and gate, up in another.

Nothing can be folded into a linear: the rows of v (and of up) are only a part of one.
"""

from qat.arch import Arch, BiasSlots

ATTENTION = ("self_attn.qkv_proj", "self_attn.o_proj")
MLP = ("mlp.gate_up_proj", "mlp.down_proj")

ARCH = Arch(
    model_types=("phi3",),
    class_name="Phi3ForCausalLM",
    linears=ATTENTION + MLP,
    shared_input=tuple((name,) for name in ATTENTION + MLP),
    norm_pairs=(("input_layernorm", ATTENTION[:1]), ("post_attention_layernorm", MLP[:1])),
    bias_slots={
        # vLLM's Phi3 is its Llama class and reads Llama's flags. TensorRT-LLM splits the fused weights itself and
        # leaves their biases behind; transformers declares none.
        "vllm": BiasSlots(by_flag={"attention_bias": ATTENTION, "mlp_bias": MLP}),
        "trtllm": BiasSlots(),
        "transformers": BiasSlots(),
    },
)
