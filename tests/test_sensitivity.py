"""Token sensitivities against one backward pass through the whole of Hugging Face's model."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from calibrate.sensitivity import chance, means, token_weights
from qat.model import Model


class Whole:
    """A model's own parameters as `Tensors`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._tensors = {name: p.detach() for name, p in model.named_parameters()}

    def names(self) -> list[str]:
        return list(self._tensors)

    def get(self, name: str) -> torch.Tensor:
        return self._tensors[name].clone()


def test_block_by_block_equals_one_backward_pass() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    whole = AutoModelForCausalLM.from_config(config).requires_grad_(True)
    windows = torch.randint(0, 40, (4, 9))
    model = Model(config, Whole(whole))
    groups = [
        [[f"{model.arch.blocks}.{i}.{name}" for name in group] for group in model.arch.shared_input] for i in range(3)
    ]
    found = token_weights(model, windows, groups, drawn=chance(4, 9, 5), batch=3, budget=2**30)

    expected: dict[str, torch.Tensor] = {group[0]: torch.zeros(4, 9) for block in groups for group in block}
    for name, squares in expected.items():
        for other in next(group for block in groups for group in block if group[0] == name):

            def add(grad: torch.Tensor, squares: torch.Tensor = squares) -> None:
                squares.add_(grad.square().sum(-1))

            def watch(module, args, out, add=add):  # type: ignore[no-untyped-def]
                out.register_hook(add)

            whole.get_submodule(other).register_forward_hook(watch)
    logp = whole(windows).logits.log_softmax(-1)
    drawn = torch.rand(36, 1, generator=torch.Generator().manual_seed(5)).view(4, 9, 1)
    token = (logp.exp().cumsum(-1) < drawn).sum(-1, keepdim=True)
    logp.gather(-1, token).sum().backward()

    assert set(found) == set(expected)
    mean = means(found, torch.device("cpu"))
    for name, squares in expected.items():
        torch.testing.assert_close(found[name] / mean[name], squares / squares.mean(), rtol=1e-3, atol=1e-5)
    waves = token_weights(model, windows, groups, drawn=chance(4, 9, 5), batch=3, budget=1)
    for name in found:
        torch.testing.assert_close(waves[name] / mean[name], found[name] / mean[name], rtol=1e-4, atol=1e-6)
