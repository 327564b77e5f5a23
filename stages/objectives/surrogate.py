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


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Surrogate:
    """-min(r A, clip(r, 1 - low, 1 + high) A), elementwise over equal shapes.

    Where the clip binds there is no gradient.
    """
    free = ratio * advantages
    bound = ratio.clamp(1 - low, 1 + high) * advantages
    return Surrogate(loss=-free.minimum(bound), ratio=ratio, clipped=bound < free)
