"""The generalised Jensen-Shannon divergence, between the forward and the reverse KL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from stages.kinds.distill.teaching import MethodBase, TaughtTokens
from stages.objectives.registry import method

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class JSDSettings(MethodBase):
    """Between the two KLs, and bounded: no token costs more than log 2."""

    name: Literal["jsd"] = "jsd"
    beta: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.5,
        description="weight of the teacher in the mixture; near 0 its gradient has the forward KL's"
        " direction, near 1 the reverse KL's",
    )


@method(JSDSettings, source="GKD, arXiv 2306.13649")
def generalised_jsd(
    tokens: TaughtTokens, settings: JSDSettings
) -> Float[Tensor, "responses tokens"]:
    """Return beta KL(pi_T || m) + (1 - beta) KL(pi || m), m = beta pi_T + (1 - beta) pi, [B, R]."""
    from parallel.model.divergences import jsd

    student = tokens.student
    return student.batch.spread(jsd(student.logits, tokens.teacher, settings.beta))
