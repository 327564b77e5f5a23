"""CISPO: the ratio is only a weight, so no token loses its gradient (arXiv 2506.13585)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from parallel.settings import Fraction
from stages.objectives.registry import AboveZero, ratio
from stages.objectives.surrogate import RatioBase, Surrogate, Tokens, bounded_exp


class CispoRatioSettings(RatioBase):
    """The token ratio as a weight, no larger than `cap` and no smaller than `floor`."""

    name: Literal["cispo"] = "cispo"
    cap: AboveZero = Field(default=6.0, description="largest weight")
    floor: Fraction = Field(
        default=0.0, description="the paper has none; verl's is 1 - clip_ratio_low, such as 0.8"
    )

    def violations(self, group_size: int) -> Iterator[tuple[str, str]]:
        if self.floor > self.cap:
            yield "floor", f"{self.floor:g} must be at most cap = {self.cap:g}"


@ratio(CispoRatioSettings, source="arXiv 2506.13585")
def cispo_ratio(tokens: Tokens, settings: CispoRatioSettings) -> Surrogate:
    """Return sg[max(min(r_t, cap), floor)] A log pi_theta, token by token.

    Example: one response of two tokens, of ratios 1.5 and 0.9, and advantage 1:
        >>> import torch
        >>> new, old = torch.tensor([[0.6, 0.225]]).log(), torch.tensor([[0.4, 0.25]]).log()
        >>> one = torch.ones(1, 2)
        >>> tokens = Tokens(new, old, old, advantages=one, mask=one > 0)
        >>> surrogate = cispo_ratio(tokens, CispoRatioSettings(cap=1.28))
        >>> surrogate.loss, surrogate.clipped  # -1.28 log 0.6 and -0.9 log 0.225
        (tensor([[0.6539, 1.3425]]), tensor([[ True, False]]))
    """
    ratio = bounded_exp(tokens.log_ratio).detach()
    weight = ratio.clamp(settings.floor, settings.cap)
    loss = -weight * tokens.advantages * tokens.logprobs
    return Surrogate(loss=loss, ratio=ratio, clipped=weight != ratio)
