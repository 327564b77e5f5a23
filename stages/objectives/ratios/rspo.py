"""RSPO: the ratio of a token falls as its routers shift (arXiv 2510.23027 v2)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from stages.objectives.ratios.geometric import geometric_surrogate
from stages.objectives.registry import AboveZero, ratio
from stages.objectives.surrogate import RatioBase, Surrogate, Tokens

if TYPE_CHECKING:
    from torch import Tensor


class RspoRatioSettings(RatioBase):
    """`geometric`, with each token's ratio scaled down, at most to `floor`, as routers move."""

    per_response: ClassVar[bool] = True
    needs_router_shift: ClassVar[bool] = True

    name: Literal["rspo"] = "rspo"
    clip_low: AboveZero = Field(default=0.4, description="ratios are clipped to exp(-clip_low)")
    clip_high: AboveZero = Field(default=0.4, description="ratios are clipped to exp(clip_high)")
    floor: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.8, description="smallest factor of a token's ratio"
    )


@ratio(RspoRatioSettings, source="arXiv 2510.23027 v2")
def rspo_ratio(tokens: Tokens, settings: RspoRatioSettings) -> Surrogate:
    """Return `geometric` of gamma_t r_t, gamma_t = max(exp(-router movement), floor).

    Ratios are scaled before they are clipped.
    """
    assert tokens.router_movement is not None
    shift = router_shift(tokens.router_movement, settings.floor)
    shifted = replace(tokens, old_log_probs=tokens.old_log_probs - shift.log())
    return geometric_surrogate(shifted, settings.clip_low, settings.clip_high)


def router_shift(movement: Tensor, floor: float) -> Tensor:
    """Return gamma = max(exp(-movement), floor) of every token [...], without gradient."""
    return movement.detach().neg().exp().clamp(min=floor)
