"""CISPO: the ratio is only a weight, so that no token loses its gradient (arXiv 2506.13585)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.objectives.settings import CispoRatioSettings
from stages.objectives.surrogate import Surrogate, bounded_exp

if TYPE_CHECKING:
    from torch import Tensor


def cispo_ratio(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: CispoRatioSettings,
) -> Surrogate:
    """-sg[max(min(r_t, cap), floor)] A log pi_theta, token by token.

    Log-probabilities [B, T] in nats, `advantages` [B, T], `mask` [B, T] bool.
    """
    ratio = bounded_exp(log_probs - old_log_probs).detach()
    weight = ratio.clamp(settings.floor, settings.cap)
    return Surrogate(loss=-weight * advantages * log_probs, ratio=ratio, clipped=weight != ratio)
