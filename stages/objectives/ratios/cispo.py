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
    """Return sg[max(min(r_t, cap), floor)] A log pi_theta, token by token."""
    ratio = bounded_exp(tokens.log_ratio).detach()
    weight = ratio.clamp(settings.floor, settings.cap)
    loss = -weight * tokens.advantages * tokens.logprobs
    return Surrogate(loss=loss, ratio=ratio, clipped=weight != ratio)
