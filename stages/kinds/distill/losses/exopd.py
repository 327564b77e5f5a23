"""Beyond the teachers: what each learned since the common start, extrapolated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from stages.kinds.distill.teaching import PARENT, SampledMethod, TaughtTokens
from stages.objectives.registry import AboveZero, method
from stages.objectives.surrogate import CorrectionSettings, NoCorrectionSettings

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class ExopdSettings(SampledMethod):
    """The reverse KL to a teacher beyond the teacher: lambda times what it learned from the start.

    With lambda = 1 it is full_vocab_reverse_kl, or sampled_token, and reads no start.
    """

    name: Literal["exopd"] = "exopd"
    lambda_: AboveZero = Field(
        default=1.25, alias="lambda", description="1 is the teacher; above 1 is beyond it"
    )
    start: str = Field(
        default=PARENT,
        description="model that the teachers started from: parent, which is `from`, or the name of"
        " a stage, or a path",
    )
    over: Literal["vocabulary", "sampled"] = Field(
        default="vocabulary",
        description="vocabulary: exact. sampled: an estimate from the sampled tokens, as published",
    )
    extrapolate: Literal["everywhere", "nucleus"] = Field(
        default="nucleus",
        description="nucleus: only tokens in the teacher's top_p; the others keep the teacher's own"
        " log-probability, since where the start has next to none lambda > 1 amplifies noise",
    )
    top_p: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.95, description="probability of the nucleus, which has at most 1,024 tokens"
    )

    @property
    def samples(self) -> bool:
        return self.over == "sampled"

    @property
    def start_model(self) -> str | None:
        return None if self.lambda_ == 1 else self.start

    @property
    def weighing(self) -> CorrectionSettings:
        return self.correction if self.samples else NoCorrectionSettings()

    def unread(self) -> Iterator[tuple[str, str]]:
        if not self.samples:
            yield "correction", "over: sampled"
        if self.lambda_ == 1:
            yield from ((key, "another lambda than 1") for key in ("start", "extrapolate", "top_p"))
        elif self.nucleus is None:
            yield "top_p", "extrapolate: nucleus"

    @property
    def nucleus(self) -> float | None:
        """The top_p to extrapolate in; None is everywhere."""
        return self.top_p if self.extrapolate == "nucleus" else None


@method(ExopdSettings, source="ExOPD, arXiv 2602.12125; over the vocabulary: derived here")
def exopd(tokens: TaughtTokens, settings: ExopdSettings) -> Float[Tensor, "responses tokens"]:
    """Return KL(pi || softmax(lambda z_T + (1 - lambda) z_b)), z_b the start's logits, [B, R].

    Sampled: -w A log pi with A = -sg[log pi - log pi_b - lambda (log pi_T - log pi_b)], whose
    expectation has the same gradient.
    """
    if settings.samples:
        return tokens.surrogate(_sampled_advantages(tokens, settings))
    if tokens.start is None:
        return tokens.student.kl(tokens.teacher)
    from parallel.model.divergences import extrapolated

    target = extrapolated(tokens.teacher, tokens.start, settings.lambda_, settings.nucleus)
    return tokens.student.kl(target)


def _sampled_advantages(
    tokens: TaughtTokens, settings: ExopdSettings
) -> Float[Tensor, "responses tokens"]:
    if tokens.start is None:
        return -tokens.gap
    learned = tokens.teacher_logprobs - tokens.start_logprobs
    if settings.nucleus is not None:
        from parallel.model.divergences import in_nucleus

        batch = tokens.student.batch
        learned = learned * batch.spread(
            in_nucleus(tokens.teacher, batch.own_targets, settings.nucleus)
        )
    return (settings.lambda_ - 1) * learned - tokens.gap
