"""RSPO: the ratio of a token falls as its routers shift (arXiv 2510.23027 v2)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from stages.objectives.ratios.geometric import GeometricBase, geometric_ratio
from stages.objectives.registry import ratio
from stages.objectives.surrogate import BelowOne, Surrogate, Tokens

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class RspoRatioSettings(GeometricBase):
    """`geometric`, with each token's ratio scaled down, at most to `floor`, as routers move."""

    needs_router_shift: ClassVar[bool] = True

    name: Literal["rspo"] = "rspo"
    floor: BelowOne = Field(default=0.8, description="smallest factor of a token's ratio")


@ratio(RspoRatioSettings, source="arXiv 2510.23027 v2")
def rspo_ratio(tokens: Tokens, settings: RspoRatioSettings) -> Surrogate:
    """Return `geometric` of gamma_t r_t, gamma_t = max(exp(-router movement), floor).

    Example: one response of two tokens, of ratios 1.5 and 0.9, and advantage 1:
        >>> import torch
        >>> new, old = torch.tensor([[0.6, 0.225]]).log(), torch.tensor([[0.4, 0.25]]).log()
        >>> one = torch.ones(1, 2)
        >>> tokens = Tokens(new, old, old, one, one > 0, router_movement=torch.tensor([[0.1, 0.5]]))
        >>> rspo_ratio(tokens, RspoRatioSettings()).ratio  # gamma is 0.9048, and 0.8, the floor
        tensor([[0.9885, 0.9885]])
    """
    assert tokens.router_movement is not None
    shift = router_shift(tokens.router_movement, settings.floor)
    # gamma r = pi_theta / (pi_old / gamma): the clip of `geometric` then sees gamma r.
    shifted = replace(tokens, old_logprobs=tokens.old_logprobs - shift.log())
    return geometric_ratio(shifted, settings)


def router_shift(movement: Float[Tensor, "*shape"], floor: float) -> Float[Tensor, "*shape"]:
    """Return gamma = max(exp(-movement), floor) of every token [...], without gradient."""
    return movement.detach().neg().exp().clamp(min=floor)
