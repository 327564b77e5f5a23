"""Full-vocabulary reverse KL, the distillation loss (section 7; DeepSeek-V4, Eq. 29)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def reverse_kl(student_log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
    """KL(student || teacher) in nats, [...], from normalised finite log-probabilities [..., V]."""
    return (student_log_probs.exp() * (student_log_probs - teacher_log_probs)).sum(-1)
