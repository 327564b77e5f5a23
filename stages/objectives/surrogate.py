"""PPO's clipped surrogate, the part every policy ratio shares (arXiv 1707.06347)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class Surrogate:
    """What a policy ratio gives for every token, each [B, T]; masked positions are unspecified.

    `clipped` (bool) is true where the clip binds.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp with its argument held to +-20, so that one stray token cannot overflow a batch."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None
) -> Surrogate:
    """-min(r A, clip(r, 1 - low, 1 + high) A), elementwise over equal shapes.

    With `dual`, c, it is max(min(...), c A) where A is negative, so that a token that became much
    likelier cannot outweigh a batch (dual clip, arXiv 1912.09729). Where a clip binds there is no
    gradient.
    """
    free = ratio * advantages
    bound = ratio.clamp(1 - low, 1 + high) * advantages
    gain, clipped = free.minimum(bound), bound < free
    if dual is not None:
        least = (dual * advantages).where(advantages < 0, -float("inf"))
        gain, clipped = gain.maximum(least), clipped | (gain < least)
    return Surrogate(loss=-gain, ratio=ratio, clipped=clipped)
