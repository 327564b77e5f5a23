"""The reverse KL's policy gradient from the sampled tokens, as MOPD merges."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from parallel.settings import NonNegative
from stages.kinds.distill.teaching import SampledMethod, TaughtTokens
from stages.objectives.registry import method

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class SampledTokenSettings(SampledMethod):
    """The sampled tokens alone: one number a token from the teacher, and noise."""

    name: Literal["sampled_token"] = "sampled_token"
    reward_weight: NonNegative = Field(
        default=0.0,
        description="weight alpha of the advantages of the domain's rewards; 0 reads none",
    )

    @property
    def needs_rewards(self) -> bool:
        return self.reward_weight > 0


@method(SampledTokenSettings, source="MOPD, arXiv 2601.02780")
def sampled_token(
    tokens: TaughtTokens, settings: SampledTokenSettings
) -> Float[Tensor, "responses tokens"]:
    """Return -w A log pi, A = sg[log pi_T - log pi] + alpha A_reward, w by pi / mu, [B, R]."""
    advantages = -tokens.gap
    if settings.reward_weight:
        advantages = advantages + settings.reward_weight * tokens.student.batch.advantages
    return tokens.surrogate(advantages)
