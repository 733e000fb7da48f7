"""Llama 1-3 and everything that calls itself LlamaForCausalLM (SmolLM2, TinyLlama, Yi...)."""

from qat.arch import Arch, BiasSlots

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
# vLLM llama.py, TensorRT-LLM modeling_llama.py and transformers agree: two flags, all seven linears. So does
# models/llama/config.py of TensorRT-LLM 1.2, where they are called attn_bias and mlp_bias.
SLOTS = BiasSlots(by_flag={"attention_bias": ATTENTION, "mlp_bias": MLP})
# a flag of InternLM's that vLLM obeys in every Llama; transformers still reads all four
VLLM = BiasSlots(by_flag=SLOTS.by_flag, unless={"qkv_bias": ATTENTION[:3]})

ARCH = Arch(
    model_types=("llama",),
    class_name="LlamaForCausalLM",
    linears=ATTENTION + MLP,
    shared_input=(ATTENTION[:3], ATTENTION[3:], MLP[:2], MLP[2:]),
    norm_pairs=(
        ("input_layernorm", ATTENTION[:3]),
        ("self_attn.v_proj", ("self_attn.o_proj",)),
        ("post_attention_layernorm", MLP[:2]),
        ("mlp.up_proj", ("mlp.down_proj",)),
    ),
    bias_slots={"vllm": VLLM, "trtllm": SLOTS, "trtllm_legacy": SLOTS, "transformers": SLOTS},
)
