"""Qwen3 mixtures of experts: Qwen3's attention; blocks have experts or, by `mlp_only_layers` and
`decoder_sparse_step`, a dense MLP."""

from qat.arch import Arch, BiasSlots
from qat.arch.llama import ATTENTION, MLP

QKV = ATTENTION[:3]
EXPERTS = "mlp.experts"
GATE_UP = (f"{EXPERTS}.*.gate_proj", f"{EXPERTS}.*.up_proj")
DOWN = (f"{EXPERTS}.*.down_proj",)

ARCH = Arch(
    model_types=("qwen3_moe",),
    class_name="Qwen3MoeForCausalLM",
    linears=ATTENTION + MLP + GATE_UP + DOWN,
    shared_input=(QKV, ATTENTION[3:], MLP[:2], MLP[2:], GATE_UP, DOWN),
    norm_pairs=(
        ("input_layernorm", QKV),
        ("self_attn.v_proj", ("self_attn.o_proj",)),
        ("post_attention_layernorm", MLP[:2]),
        ("mlp.up_proj", ("mlp.down_proj",)),
        ("post_attention_layernorm", ("mlp.gate", *GATE_UP)),
        (GATE_UP[1], DOWN),
    ),
    experts=EXPERTS,
    routers=("mlp.gate",),
    dense=MLP,
    # attention as in Qwen3; no engine loads the bias of an expert in more than one format
    bias_slots={
        "vllm": BiasSlots(by_flag={"attention_bias": QKV}),
        "trtllm": BiasSlots(by_flag={"attention_bias": ATTENTION}),
        "transformers": BiasSlots(by_flag={"attention_bias": ATTENTION}),
    },
)
