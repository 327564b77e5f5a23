"""Group Sequence Policy Optimization: one ratio a response (arXiv 2507.18071)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.objectives.aggregation import sequence_means
from stages.objectives.settings import SequenceRatioSettings, SequenceTokenRatioSettings
from stages.objectives.surrogate import Surrogate, bounded_exp, clipped_surrogate

if TYPE_CHECKING:
    from torch import Tensor


def sequence_ratio(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: SequenceRatioSettings,
) -> Surrogate:
    """The surrogate of s_i = exp(mean_t log-ratio), repeated at each token of its response.

    Log-probabilities [B, T] in nats, `advantages` [B, T], `mask` [B, T] bool. Every token of a
    response carries the response's own loss, so its mean over the tokens, and with it the
    `sequence_mean` aggregation, is exactly the loss of GSPO.
    """
    ratio = _ratio(log_probs - old_log_probs, mask).expand_as(log_probs)
    return clipped_surrogate(
        ratio, advantages, settings.clip_low, settings.clip_high, settings.dual_clip
    )


def sequence_token_ratio(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: SequenceTokenRatioSettings,
) -> Surrogate:
    """GSPO-token: the surrogate of s_it = sg[s_i] pi_theta / sg[pi_theta], token by token.

    All shapes as above. Where the tokens of a response have one advantage it is `sequence`; where
    they have their own, each learns from its own.
    """
    own = log_probs - log_probs.detach()
    ratio = _ratio(log_probs - old_log_probs, mask).detach() * bounded_exp(own)
    return clipped_surrogate(
        ratio, advantages, settings.clip_low, settings.clip_high, settings.dual_clip
    )


def _ratio(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """s_i of every response, [B, 1]."""
    return bounded_exp(sequence_means(log_ratio, mask)).unsqueeze(-1)
