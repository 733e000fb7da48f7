"""Training losses, each summed over tokens so that chunks add up."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _log_probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Of logits (..., vocabulary) divided by the temperature; float32."""
    return F.log_softmax(logits / temperature if temperature != 1 else logits, -1, dtype=torch.float32)


class _Divergence(torch.autograd.Function):
    """T^2 times the sum of p (log p - log q), q = softmax(s / T). Keeps the gradient, T (q - p), not both inputs."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, p_log: Tensor, temperature: float) -> Tensor:
        q_log = _log_probabilities(student, temperature)
        p = p_log.exp()
        loss = (p * (p_log - q_log)).sum()
        ctx.save_for_backward(q_log.exp_().sub_(p).mul_(temperature))
        return loss * temperature**2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return slope * grad, None, None


def kl(teacher: Tensor, student: Tensor, temperature: float = 1.0) -> Tensor:
    """Forward KL(teacher || student), nats summed over all positions; scalar float32.

    teacher, student: logits (..., vocabulary). With a temperature T both are divided by it and the result is multiplied
    by T^2, so that gradients keep their size (Hinton, Vinyals and Dean 2015, section 2.1).
    """
    p_log = _log_probabilities(teacher, temperature)
    return _Divergence.apply(student, p_log, temperature)


def top_log(teacher: Tensor, top: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The `top` most likely tokens of logits (tokens, vocabulary): int32 indices and float16 log-probabilities."""
    p_log = _log_probabilities(teacher, temperature)
    values, indices = p_log.topk(top, -1)
    return indices.int(), values.half()


def top_kl(indices: Tensor, p_log: Tensor, student: Tensor, temperature: float = 1.0) -> Tensor:
    """Forward KL when all but the teacher's top tokens are one event; nats summed over tokens, scalar float32.

    indices: (tokens, k); p_log: their log-probabilities; student: logits (tokens, vocabulary). Merging events never
    raises a KL, so this is a lower bound of `kl`, short of it by how the two tails differ in shape.
    """
    q_log = _log_probabilities(student, temperature)
    q_log, p_log = q_log.gather(-1, indices.long()), p_log.float()
    tiny = torch.finfo(torch.float32).tiny
    p, q_rest = p_log.exp(), (1 - q_log.exp().sum(-1)).clamp_min(1e-9)
    p_rest = (1 - p.sum(-1)).clamp_min(0)
    rest = p_rest * (p_rest.clamp_min(tiny).log() - q_rest.log())
    return ((p * (p_log - q_log)).sum() + rest.sum()) * temperature**2


def next_token(student: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy summed over tokens. student: logits (tokens, vocabulary); labels: (tokens,), -100 is none."""
    return F.cross_entropy(student, labels, ignore_index=-100, reduction="sum")


def hidden_error(teacher: Tensor, student: Tensor) -> Tensor:
    """Squared error of the last block's output relative to the teacher's, summed over tokens (tokens, hidden)."""
    goal = teacher.float()
    error = (student.float() - goal).square().sum(-1)
    return (error / goal.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)).sum()
