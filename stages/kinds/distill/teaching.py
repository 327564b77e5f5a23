"""The tokens that the methods of a merge compare, and the base of the methods' settings.

A method returns a loss for every token. With a divergence over the vocabulary its gradient is
exact; a method that `samples` has only the sampled token's log-probabilities, and its gradient is
that of -w A log pi with an advantage A, an estimate from the policy's own samples. Never imports
torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import model_serializer

from stages.objectives.registry import AlgorithmSettings
from stages.objectives.surrogate import (
    CorrectionSettings,
    IcePopSettings,
    NoCorrectionSettings,
)

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from parallel.batch import Responses
    from parallel.model.vocabulary import HeadLogits

PARENT = "parent"


class MethodBase(AlgorithmSettings):
    """The base of a method's settings; the class variable and the properties say what it needs.

    `is_kl`: the loss is the KL of the student to the teacher itself. A method without keys is
    written as its plain name.
    """

    is_kl: ClassVar[bool] = False

    @property
    def samples(self) -> bool:
        """True where the loss is of the sampled tokens alone, and not of the vocabulary."""
        return False

    @property
    def needs_rewards(self) -> bool:
        """True where it reads the advantages of the domain's rewards."""
        return False

    @property
    def start_model(self) -> str | None:
        """The model that the teachers started from, if it is read."""
        return None

    @property
    def weighing(self) -> CorrectionSettings:
        """The weights of tokens by pi / mu."""
        return NoCorrectionSettings()

    def unread(self) -> Iterator[tuple[str, str]]:
        """Yield each field that the others leave unread, and what reads it: `over: sampled`."""
        yield from ()

    @model_serializer(mode="wrap")
    def _plain_name(self, keys: Any) -> Any:
        dumped = keys(self)
        return dumped["name"] if len(dumped) == 1 else dumped


class SampledMethod(MethodBase):
    """A method that reads the sampled tokens alone."""

    correction: CorrectionSettings = IcePopSettings()

    def violations(self, group_size: int) -> Iterator[tuple[str, str]]:
        for key, message in self.correction.violations(group_size):
            yield f"correction.{key}", message

    @property
    def samples(self) -> bool:
        return True

    @property
    def weighing(self) -> CorrectionSettings:
        return self.correction


@dataclass(frozen=True)
class TaughtTokens:
    """B responses of at most R tokens as student and teacher see them, in nats.

    `student` has gradient; `teacher` and `start`, the model that the teachers started from, are at
    the same tokens. `logprobs` [B, R] are the student's of the sampled tokens, at the `temperature`
    and over the kept sets that they were sampled with; they have gradient where the method samples.
    """

    student: Responses
    teacher: HeadLogits
    start: HeadLogits | None
    logprobs: Float[Tensor, "responses tokens"]
    temperature: float

    @property
    def teacher_logprobs(self) -> Float[Tensor, "responses tokens"]:
        """The teacher's log-probabilities of the sampled tokens, [B, R]."""
        return self._of(self.teacher)

    @property
    def start_logprobs(self) -> Float[Tensor, "responses tokens"]:
        """The start's log-probabilities of the sampled tokens, [B, R]."""
        assert self.start is not None
        return self._of(self.start)

    @property
    def gap(self) -> Float[Tensor, "responses tokens"]:
        """The sampled tokens' log pi - log pi_T without gradient, [B, R]."""
        return self.logprobs.detach() - self.teacher_logprobs

    def surrogate(
        self, advantages: Float[Tensor, "responses tokens"]
    ) -> Float[Tensor, "responses tokens"]:
        """Return -w A log pi of every token, [B, R], A [B, R] without gradient.

        w is the batch's weight by pi / mu, 1 without a correction.
        """
        weights = self.student.batch.weights
        weighed = advantages if weights is None else advantages * weights
        return -weighed * self.logprobs

    def _of(self, model: HeadLogits) -> Float[Tensor, "responses tokens"]:
        return replace(self.student, logits=model).logprobs(self.temperature)
