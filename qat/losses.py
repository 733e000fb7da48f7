"""Training losses on logits."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def kl(teacher: Tensor, student: Tensor, temperature: float = 1.0) -> Tensor:
    """Forward KL(teacher || student), nats per token, mean over all positions; scalar float32.

    teacher, student: logits (..., vocabulary). With a temperature T both are divided by it and the result is multiplied
    by T^2, so that gradients keep their size (Hinton, Vinyals and Dean 2015, section 2.1).
    """
    p = F.log_softmax(teacher.flatten(0, -2).float() / temperature, -1)
    q = F.log_softmax(student.flatten(0, -2).float() / temperature, -1)
    return F.kl_div(q, p, reduction="batchmean", log_target=True) * temperature**2
