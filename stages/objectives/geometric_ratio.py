"""Geometric-mean policy optimisation, and what the shift of a router makes of it.

GMPO: arXiv 2507.20673. RSPO, 2510.23027 v2, rescales every token's ratio before it is clipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.objectives.aggregation import sequence_means
from stages.objectives.router_shift import router_shift
from stages.objectives.settings import GeometricRatioSettings, RspoRatioSettings
from stages.objectives.surrogate import Surrogate, bounded_exp

if TYPE_CHECKING:
    from torch import Tensor


def geometric_ratio(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: GeometricRatioSettings | RspoRatioSettings,
) -> Surrogate:
    """-A exp(mean_t clip(log r_t)) at every token of a response.

    Log-probabilities [B, T] in nats, `advantages` [B, T], `mask` [B, T] bool. A token's log-ratio
    is clipped from above, at `clip_high`, where its advantage is positive, and from below, at
    -`clip_low`, where it is negative: a stray token then costs its own gradient, and not that of
    its response.
    """
    log_ratio = log_probs - old_log_probs
    above = log_ratio.clamp(max=settings.clip_high)
    below = log_ratio.clamp(min=-settings.clip_low)
    held = above.where(advantages >= 0, below)
    ratio = bounded_exp(sequence_means(held, mask)).unsqueeze(-1).expand_as(log_ratio)
    return Surrogate(loss=-ratio * advantages, ratio=ratio, clipped=held != log_ratio)


def rspo_ratio(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: RspoRatioSettings,
    movement: Tensor,
) -> Surrogate:
    """The same of gamma_t r_t, where gamma falls from 1 as the routers move, `movement` [B, T] (see
    `stages.objectives.router_shift`)."""
    shifted = old_log_probs - router_shift(movement, settings.floor).log()
    return geometric_ratio(log_probs, shifted, advantages, mask, settings)
