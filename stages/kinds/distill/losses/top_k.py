"""The reverse KL over the teacher's most likely tokens, with what the others hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from parallel.settings import Count
from stages.kinds.distill.teaching import MethodBase, TaughtTokens
from stages.objectives.registry import method

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class TopKReverseKLSettings(MethodBase):
    """The reverse KL over the k most likely tokens of the teacher."""

    name: Literal["top_k_reverse_kl"] = "top_k_reverse_kl"
    k: Count = Field(default=64, description="most likely tokens of the teacher")
    tail: Literal["corrected", "lumped"] = Field(
        default="corrected",
        description="the other tokens. corrected: they are not compared. lumped: they count as one"
        " token, whose probability student and teacher should share",
    )


@method(TopKReverseKLSettings, source="arXiv 2606.30406")
def top_k_reverse_kl(
    tokens: TaughtTokens, settings: TopKReverseKLSettings
) -> Float[Tensor, "responses tokens"]:
    """Return sum of p log(p / p_T) - p + p_T over the k, and over the rest as one if lumped.

    Without the last two terms the optimum is not the teacher: every token outside the k would be
    free probability.
    """
    from parallel.model.divergences import log_rest
    from parallel.model.vocabulary import logprobs, top_k

    student, teacher = tokens.student, tokens.teacher
    log_q, ids = top_k(teacher, settings.k)
    log_p = logprobs(student.logits, ids)
    values = generalised_kl(log_p, log_q).sum(-1)
    if settings.tail == "lumped":
        values = values + generalised_kl(log_rest(student.logits, ids), log_rest(teacher, ids))
    return student.batch.spread(values)


def generalised_kl(
    log_p: Float[Tensor, "*shape"], log_q: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Return p log(p / q) - p + q, elementwise: 0 with gradient 0 where p = q, else above 0."""
    p = log_p.exp()
    return p * (log_p - log_q) - p + log_q.exp()
