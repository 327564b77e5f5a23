"""Geometric-mean policy optimisation (GMPO, arXiv 2507.20673)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stages.objectives.aggregation import sequence_means
from stages.objectives.registry import AboveZero, ratio
from stages.objectives.surrogate import RatioBase, Surrogate, Tokens, bounded_exp


class GeometricRatioSettings(RatioBase):
    """Geometric mean of token ratios, each clipped to exp(-clip_low) and exp(clip_high)."""

    per_response: ClassVar[bool] = True

    name: Literal["geometric"] = "geometric"
    clip_low: AboveZero = Field(default=0.4, description="ratios are clipped to exp(-clip_low)")
    clip_high: AboveZero = Field(default=0.4, description="ratios are clipped to exp(clip_high)")


@ratio(GeometricRatioSettings, source="arXiv 2507.20673")
def geometric_ratio(tokens: Tokens, settings: GeometricRatioSettings) -> Surrogate:
    """Return A exp(mean_t clip(log r_t)) at every token of a response."""
    return geometric_surrogate(tokens, settings.clip_low, settings.clip_high)


def geometric_surrogate(tokens: Tokens, low: float, high: float) -> Surrogate:
    """Return the surrogate A exp(mean_t clip(log r_t)) at every token of a response.

    A token's log-ratio is clipped from above, at `high`, where its advantage is positive, and from
    below, at -`low`, where it is negative: a stray token loses its own gradient, and not that of
    its response.
    """
    log_ratio, advantages = tokens.log_ratio, tokens.advantages
    above = log_ratio.clamp(max=high)
    below = log_ratio.clamp(min=-low)
    held = above.where(advantages >= 0, below)
    ratio = bounded_exp(sequence_means(held, tokens.mask)).unsqueeze(-1).expand_as(log_ratio)
    return Surrogate(loss=-ratio * advantages, ratio=ratio, clipped=held != log_ratio)
