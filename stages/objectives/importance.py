"""What samples of older weights weigh, and by how much at most (algorithms, section 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.objectives.aggregation import sequence_means
from stages.objectives.surrogate import bounded_exp

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 2.0  # C: no sample weighs more than two


def truncated_importance(old_log_probs: Tensor, engine_log_probs: Tensor, mask: Tensor) -> Tensor:
    """min(pi_old / mu, C) of every response, [B], without gradient (TIS).

    Both log-probabilities [B, T] in nats, `mask` [B, T] bool. The ratio is the geometric mean over
    the response's tokens: a product would vanish with their number.
    """
    log_ratio = sequence_means((old_log_probs - engine_log_probs).detach(), mask)
    return bounded_exp(log_ratio).clamp(max=LARGEST)
