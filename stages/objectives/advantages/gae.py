"""Generalised advantage estimation and the clipped value loss: PPO with a critic.

Everything is [B, T], one row a response; `mask`, bool, is true on its tokens, the row's first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from parallel.settings import Fraction, Natural, OptimizerSettings, Settings
from stages.objectives.graded import Standardised
from stages.objectives.registry import AboveZero, advantage

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


class CriticSettings(Settings):
    """A value model beside the policy, with its family, layout and initial weights."""

    optimizer: OptimizerSettings = OptimizerSettings(learning_rate=1e-5)
    value_clip: AboveZero = Field(default=0.2, description="PPO value clip range")
    warmup_steps: Natural = Field(
        default=0, description="first steps, in which only the critic is trained"
    )


class GaeSettings(Standardised):
    """Each token against a critic's values (PPO), in standard deviations of all tokens."""

    baseline: ClassVar[Literal["critic"]] = "critic"
    per_token: ClassVar[bool] = True

    name: Literal["gae"] = "gae"
    gamma: Fraction = Field(default=1.0, description="discount of later rewards")
    lambda_: Fraction = Field(
        default=0.95, alias="lambda", description="decay of the temporal-difference errors"
    )
    critic: CriticSettings = CriticSettings()

    @property
    def warmup_steps(self) -> int:
        return self.critic.warmup_steps


@advantage(GaeSettings, source="arXiv 1506.02438, 1707.06347")
def gae(
    rewards: Float[Tensor, "responses tokens"],
    values: Float[Tensor, "responses tokens"],
    mask: Bool[Tensor, "responses tokens"],
    settings: GaeSettings,
) -> Float[Tensor, "responses tokens"]:
    """Return A_t = sum over k of (gamma lambda)^k delta_{t+k}; 0 where masked, without gradient.

    delta_t = r_t + gamma V_{t+1} - V_t, where the value after the last token is 0. The target of
    the values is A + V.

    Example: three tokens, each worth 0.5 to the critic, and a reward of 1 at the last:
        >>> import torch
        >>> rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.full((1, 3), 0.5)
        >>> settings = GaeSettings.model_validate({"gamma": 1.0, "lambda": 0.5})
        >>> gae(rewards, values, values > 0, settings)  # delta = 0, 0, 0.5
        tensor([[0.1250, 0.2500, 0.5000]])
    """
    # Advantages are constants of the policy's loss, and the value loss takes its own gradient.
    rewards, values = (tensor.detach().masked_fill(~mask, 0.0) for tensor in (rewards, values))
    following = values.roll(-1, -1)
    following[..., -1] = 0.0
    delta = (rewards + settings.gamma * following - values).masked_fill(~mask, 0.0)
    advantages = delta.clone()
    # From the last token back: A_t = delta_t + gamma lambda A_{t+1}.
    for token in reversed(range(delta.shape[-1] - 1)):
        advantages[..., token] += settings.gamma * settings.lambda_ * advantages[..., token + 1]
    return advantages


def clipped_value_loss(
    values: Float[Tensor, "*shape"],
    old_values: Float[Tensor, "*shape"],
    targets: Float[Tensor, "*shape"],
    clip: float,
) -> Float[Tensor, "*shape"]:
    """Return half the larger of (V - target)^2 and (clip(V, old V +- clip) - target)^2, a token."""
    held = old_values + (values - old_values).clamp(-clip, clip)
    return (values - targets).square().maximum((held - targets).square()) / 2
