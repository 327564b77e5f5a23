"""Full-vocabulary reverse KL, the distillation loss (section 7; DeepSeek-V4, Eq. 29)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def reverse_kl(
    student_log_probs: Tensor,
    teacher_log_probs: Tensor,
    sum_vocabulary: Callable[[Tensor], Tensor],
) -> Tensor:
    """KL(student || teacher) in nats, [...], from finite log-probabilities [..., V].

    Both are normalised over the whole vocabulary, of which this rank may hold only a part:
    `sum_vocabulary` reduces the last dimension over all of it.
    """
    return sum_vocabulary(student_log_probs.exp() * (student_log_probs - teacher_log_probs))
