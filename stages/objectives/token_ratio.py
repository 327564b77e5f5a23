"""The ratio of PPO and GRPO: one for each token (arXiv 2402.03300; clip-higher: 2503.14476)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.objectives.settings import TokenRatioSettings
from stages.objectives.surrogate import Surrogate, bounded_exp, clipped_surrogate

if TYPE_CHECKING:
    from torch import Tensor


def token_ratio(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: TokenRatioSettings,
) -> Surrogate:
    """The surrogate of r_t = exp(log pi_theta - log pi_old).

    Log-probabilities [B, T] in nats, `advantages` [B, T], `mask` [B, T] bool.
    """
    ratio = bounded_exp(log_probs - old_log_probs)
    return clipped_surrogate(
        ratio, advantages, settings.clip_low, settings.clip_high, settings.dual_clip
    )
