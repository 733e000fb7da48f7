"""Gemma 3, text only (gemma3_text: the 270M and 1B checkpoints, and the text model cut out of a larger one).

Norms multiply by 1 + weight. Each half of a block lies between two norms; the second ones feed the residual stream, so
only the first ones can take a factor.
"""

from qat.arch import Arch, BiasSlots
from qat.arch.llama import ARCH as LLAMA
from qat.arch.llama import ATTENTION, MLP

SLOTS = BiasSlots(by_flag={"attention_bias": ATTENTION})

ARCH = Arch(
    model_types=("gemma3_text",),
    class_name="Gemma3ForCausalLM",
    linears=LLAMA.linears,
    shared_input=LLAMA.shared_input,
    norm_pairs=(
        ("input_layernorm", ATTENTION[:3]),
        ("self_attn.v_proj", ("self_attn.o_proj",)),
        ("pre_feedforward_layernorm", MLP[:2]),
        ("mlp.up_proj", ("mlp.down_proj",)),
    ),
    norm_offset=1.0,
    # TensorRT-LLM's attention never has a bias
    bias_slots={"vllm": SLOTS, "trtllm": BiasSlots(by_flag={"mlp_bias": MLP}), "transformers": SLOTS},
)
