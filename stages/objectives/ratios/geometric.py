"""Geometric-mean policy optimisation (GMPO, arXiv 2507.20673)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stages.objectives.registry import AboveZero, ratio
from stages.objectives.surrogate import RatioBase, Surrogate, Tokens, bounded_exp, sequence_means


class GeometricBase(RatioBase):
    """A geometric mean of token ratios, each clipped to exp(-clip_low) and exp(clip_high)."""

    per_response: ClassVar[bool] = True
    corrected_by_token: ClassVar[bool] = False  # GMPO and RSPO define no weights of tokens

    clip_low: AboveZero = Field(default=0.4, description="ratios are clipped to exp(-clip_low)")
    clip_high: AboveZero = Field(default=0.4, description="ratios are clipped to exp(clip_high)")


class GeometricRatioSettings(GeometricBase):
    """Geometric mean of token ratios, each clipped to exp(-clip_low) and exp(clip_high)."""

    name: Literal["geometric"] = "geometric"


@ratio(GeometricRatioSettings, source="arXiv 2507.20673")
def geometric_ratio(tokens: Tokens, settings: GeometricBase) -> Surrogate:
    """Return A exp(mean_t clip(log r_t)) at every token of a response.

    A token's log-ratio is clipped from above where its advantage is positive, and from below where
    it is negative: a stray token loses its own gradient, and not that of its response.

    Example: one response of two tokens, of ratios 1.5 and 0.9, and advantage 1:
        >>> import torch
        >>> new, old = torch.tensor([[0.6, 0.225]]).log(), torch.tensor([[0.4, 0.25]]).log()
        >>> one = torch.ones(1, 2)
        >>> tokens = Tokens(new, old, old, advantages=one, mask=one > 0)
        >>> surrogate = geometric_ratio(tokens, GeometricRatioSettings())
        >>> surrogate.loss, surrogate.clipped  # log 1.5 = 0.405 is clipped to 0.4
        (tensor([[-1.1587, -1.1587]]), tensor([[ True, False]]))
    """
    log_ratio, advantages = tokens.log_ratio, tokens.advantages
    above = log_ratio.clamp(max=settings.clip_high)
    below = log_ratio.clamp(min=-settings.clip_low)
    held = above.where(advantages >= 0, below)
    ratio = bounded_exp(sequence_means(held, tokens.mask)).unsqueeze(-1).expand_as(log_ratio)
    return Surrogate(loss=-ratio * advantages, ratio=ratio, clipped=held != log_ratio)
