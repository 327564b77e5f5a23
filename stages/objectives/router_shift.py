"""What a token weighs whose routers have moved since the step began (RSPO, arXiv 2510.23027 v2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def router_shift(movement: Tensor, floor: float) -> Tensor:
    """gamma = max(exp(-movement), floor) of every token, without gradient.

    `movement` [...] is the mean over layers, and over the experts that the old router chose in
    each, of |log p - log p_old|, in nats.
    """
    return movement.detach().neg().exp().clamp(min=floor)
