"""The forward KL over the whole vocabulary: cross-entropy with the teacher's distribution."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from stages.kinds.distill.teaching import MethodBase, TaughtTokens
from stages.objectives.registry import method

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class ForwardKLSettings(MethodBase):
    """The student covers all that its teacher might do."""

    name: Literal["forward_kl"] = "forward_kl"


@method(ForwardKLSettings, source="GKD, arXiv 2306.13649")
def forward_kl(
    tokens: TaughtTokens, settings: ForwardKLSettings
) -> Float[Tensor, "responses tokens"]:
    """Return KL(pi_T || pi) over the whole vocabulary, [B, R]."""
    from parallel.model.vocabulary import kl

    student = tokens.student
    return student.batch.spread(kl(tokens.teacher, student.logits))
