"""Mixtral: Mistral's attention and a mixture of experts in every block. Each expert is gate (w1), down (w2), up (w3).

Checkpoints call the mixture block_sparse_moe; transformers 5 renames it and stacks the experts when it loads.
"""

from qat.arch import Arch, BiasSlots
from qat.arch.llama import ATTENTION

EXPERTS = "block_sparse_moe.experts"
GATE_UP = (f"{EXPERTS}.*.w1", f"{EXPERTS}.*.w3")
DOWN = (f"{EXPERTS}.*.w2",)

ARCH = Arch(
    model_types=("mixtral",),
    class_name="MixtralForCausalLM",
    linears=ATTENTION + GATE_UP + DOWN,
    shared_input=(ATTENTION[:3], ATTENTION[3:], GATE_UP, DOWN),
    norm_pairs=(
        ("input_layernorm", ATTENTION[:3]),
        ("self_attn.v_proj", ("self_attn.o_proj",)),
        ("post_attention_layernorm", ("block_sparse_moe.gate", *GATE_UP)),
        (GATE_UP[1], DOWN),
    ),
    experts=EXPERTS,
    gate_up_down=("w1", "w3", "w2"),
    routers=("block_sparse_moe.gate",),
    renamed={"block_sparse_moe": "mlp"},
    bias_slots={"vllm": BiasSlots(), "trtllm": BiasSlots(), "transformers": BiasSlots()},
)
