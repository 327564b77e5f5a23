"""Generalised advantage estimation and the clipped value loss: PPO with a critic.

Sources: arXiv 1506.02438 and 1707.06347. Everything is [B, T], one row a response, `mask` bool true
on its tokens, which stand at the beginning of the row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def gae(rewards: Tensor, values: Tensor, mask: Tensor, discount: float, decay: float) -> Tensor:
    """A_t = sum over k of (discount decay)^k delta_{t+k}, 0 outside the mask and without gradient.

    delta_t = r_t + discount V_{t+1} - V_t, where the value after the last token is 0. The target of
    the values is A + V.
    """
    rewards, values = (each.detach().masked_fill(~mask, 0.0) for each in (rewards, values))
    following = values.roll(-1, -1)
    following[..., -1] = 0.0
    delta = (rewards + discount * following - values).masked_fill(~mask, 0.0)
    advantages = delta.clone()
    for token in reversed(range(delta.shape[-1] - 1)):
        advantages[..., token] += discount * decay * advantages[..., token + 1]
    return advantages


def clipped_value_loss(values: Tensor, old_values: Tensor, targets: Tensor, clip: float) -> Tensor:
    """Half the larger square of V - target and of (V held to old V +- clip) - target, a token."""
    held = old_values + (values - old_values).clamp(-clip, clip)
    return (values - targets).square().maximum((held - targets).square()) / 2
