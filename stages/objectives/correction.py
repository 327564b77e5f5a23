"""What a token weighs that pi_old did not draw: the engine did, or older weights (section 4)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from stages.objectives.aggregation import sequence_means
from stages.objectives.settings import IcePopSettings, SequenceMaskSettings, TisSettings
from stages.objectives.surrogate import bounded_exp

if TYPE_CHECKING:
    from torch import Tensor


def correction_weights(
    old_log_probs: Tensor,
    engine_log_probs: Tensor,
    mask: Tensor,
    settings: TisSettings | IcePopSettings,
) -> Tensor:
    """What the surrogate of every token is multiplied by, [B, T], without gradient.

    Both log-probabilities [B, T] in nats, pi_old's and mu's, `mask` [B, T] bool. The ratio of a
    sequence is the geometric mean over its tokens: a product would vanish with their number.
    """
    log_ratio = (old_log_probs - engine_log_probs).detach().masked_fill(~mask, 0.0)
    if settings.level == "sequence":
        log_ratio = sequence_means(log_ratio, mask).unsqueeze(-1).expand_as(log_ratio)
    return CORRECTIONS[settings.name](bounded_exp(log_ratio), settings)


def truncated(ratio: Tensor, settings: TisSettings) -> Tensor:
    """min(pi_old / mu, cap): truncated importance sampling."""
    return ratio.clamp(max=settings.cap)


def icepop(ratio: Tensor, settings: IcePopSettings) -> Tensor:
    """pi_old / mu within [low, high], else 0: what the two disagree about teaches nothing."""
    return ratio.masked_fill((ratio < settings.low) | (ratio > settings.high), 0.0)


def sequence_mask(
    log_probs: Tensor,
    engine_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: SequenceMaskSettings,
) -> Tensor:
    """M of DeepSeek-V3.2 (arXiv 2512.02556), [B, T] bool: what the policy gradient keeps.

    False where the advantage is negative and mean_t(log mu - log pi_theta) of the response is above
    delta: a bad response that the policy would hardly give any more teaches it nothing but noise.
    Log-probabilities [B, T] in nats, `advantages` [B, T], `mask` [B, T] bool.
    """
    behind = sequence_means((engine_log_probs - log_probs).detach(), mask) > settings.delta
    return ~(behind.unsqueeze(-1) & (advantages < 0))


CORRECTIONS: dict[str, Callable[[Tensor, Any], Tensor]] = {"tis": truncated, "icepop": icepop}
