"""Sampled tokens that weigh more where their prefix is still near the teacher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from parallel.settings import NonNegative
from stages.kinds.distill.teaching import SampledMethod, TaughtTokens
from stages.objectives.registry import method

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class IwOpdSettings(SampledMethod):
    """A teacher knows less about text that it would not have written: late tokens weigh less."""

    name: Literal["iw_opd"] = "iw_opd"
    gamma: NonNegative = Field(
        default=0.5,
        description="weight of a response's first token above its last; 0 is sampled_token",
    )


@method(IwOpdSettings, source="IW-OPD, arXiv 2606.22600")
def iw_opd(tokens: TaughtTokens, settings: IwOpdSettings) -> Float[Tensor, "responses tokens"]:
    """Return -w v A log pi, A = sg[log pi_T - log pi], [B, R].

    v_t = 1 + gamma (1 - sum_{s < t} |A_s| / sum_s |A_s|) over the learned tokens of the response:
    1 + gamma at the first, and towards 1 as the response leaves the teacher.
    """
    from parallel.model.divergences import prefix_sums

    advantages = -tokens.gap.masked_fill(~tokens.student.batch.mask, 0.0)
    distance = advantages.abs()
    total = distance.sum(-1, keepdim=True)
    share = prefix_sums(distance) / total.where(total > 0, 1.0)
    return tokens.surrogate((1 + settings.gamma * (1 - share)) * advantages)
