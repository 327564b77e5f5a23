"""Group Sequence Policy Optimization: one ratio a response (arXiv 2507.18071)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.objectives.settings import SequenceRatioSettings
from stages.objectives.surrogate import Surrogate, bounded_exp, clipped_surrogate

if TYPE_CHECKING:
    from torch import Tensor


def sequence_ratio(
    log_ratio: Tensor, advantages: Tensor, mask: Tensor, settings: SequenceRatioSettings
) -> Surrogate:
    """The surrogate of s_i = exp(mean_t log-ratio), repeated at each token of its response.

    `log_ratio` [B, T] is log pi_theta - log pi_old in nats, `advantages` [B], `mask` [B, T] bool.
    Every token of a response carries the response's own loss, so its mean over the tokens, and
    with it the `sequence_mean` aggregation, is exactly the loss of GSPO.
    """
    lengths = mask.sum(-1).clamp(min=1)
    mean_log_ratio = log_ratio.masked_fill(~mask, 0.0).sum(-1) / lengths
    ratio = bounded_exp(mean_log_ratio).unsqueeze(-1).expand_as(log_ratio)
    return clipped_surrogate(ratio, advantages.unsqueeze(-1), settings.clip_low, settings.clip_high)
