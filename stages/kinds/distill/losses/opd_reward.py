"""The domain's own rewards with its teacher beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from stages.kinds.distill.teaching import SampledMethod, TaughtTokens
from stages.objectives.registry import AboveZero, method

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class OpdRewardSettings(SampledMethod):
    """The domain's own advantages less a penalty for leaving its teacher.

    The advantages are of the domain's `rewards` by its `objective.advantage`. A response whose
    reward failed has none, and still learns from the teacher.
    """

    name: Literal["opd_reward"] = "opd_reward"
    teacher_weight: AboveZero = Field(
        default=1.0, description="weight lambda of the teacher beside the rewards"
    )

    @property
    def needs_rewards(self) -> bool:
        return True


@method(OpdRewardSettings, source="on-policy distillation as a penalty, as in slime")
def opd_reward(
    tokens: TaughtTokens, settings: OpdRewardSettings
) -> Float[Tensor, "responses tokens"]:
    """Return -w (A - lambda sg[log pi - log pi_T]) log pi, w by pi / mu, [B, R]."""
    advantages = tokens.student.batch.advantages - settings.teacher_weight * tokens.gap
    return tokens.surrogate(advantages)
