"""How far a router moved from the experts that it had chosen for a token (RSPO, 2510.23027 v2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

FLOOR = 0.8


def router_shift(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """gamma [...] = max(exp(-mean |log p - log p_old|), .8) of every token, without gradient.

    Both [..., L, K], in nats: of the K experts that the old router chose in each of L layers, under
    the router of today and under the old one.
    """
    moved = (log_probs - old_log_probs).detach().abs().mean((-2, -1))
    return moved.neg().exp().clamp(min=FLOOR)
