"""What the responses of a batch earned, as every advantage is given it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

STD_FLOOR = 1e-6

Std = Literal["population", "sample"]


@dataclass(frozen=True)
class Graded:
    """Groups of at most G responses, a group to a prompt; floating point but where it says so.

    rewards [groups, G]; graded bool [groups, G], false where there is no response, or one whose
    reward failed: then nothing else about it is read. lengths int64 [groups, G], in tokens.

    Where rewards have K parts: parts [groups, G, K], before they are weighed, and weights [K].
    Where the S steps of a response are rewarded one by one: step_rewards [groups, G, S], and
    step_ends int64 [groups, G, S], the place in its response of a step's last token, or -1.
    """

    rewards: Tensor
    graded: Tensor
    lengths: Tensor
    parts: Tensor | None = None
    weights: Tensor | None = None
    step_rewards: Tensor | None = None
    step_ends: Tensor | None = None

    @property
    def comparable(self) -> Tensor:
        """Which groups [groups] have two graded responses or more."""
        return self.graded.sum(-1) >= 2

    @property
    def zero_variance(self) -> Tensor:
        """Which groups [groups] reward every response alike, or have no two to compare."""
        return constant(self.rewards, self.graded).squeeze(-1) | ~self.comparable


def centre(values: Tensor, mask: Tensor) -> Tensor:
    """`values` [..., N] less their mean where `mask`; 0 elsewhere.

    Exactly 0, whatever the rounding, where all of them are equal.
    """
    values = values.masked_fill(~mask, 0.0)
    mean = values.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return (values - mean).masked_fill(~mask | constant(values, mask), 0.0)


def standardise(values: Tensor, mask: Tensor, std: Std) -> Tensor:
    """The same, over (their standard deviation + 1e-6)."""
    return scale(centre(values, mask), mask, std)


def scale(centred: Tensor, mask: Tensor, std: Std) -> Tensor:
    """Values [..., N] whose mean is 0 where `mask`, and which are 0 elsewhere, over (their standard
    deviation + 1e-6)."""
    count = mask.sum(-1, keepdim=True) - (1 if std == "sample" else 0)
    deviation = (centred.square().sum(-1, keepdim=True) / count.clamp(min=1)).sqrt()
    return centred / (deviation + STD_FLOOR)


def constant(values: Tensor, mask: Tensor) -> Tensor:
    """Whether `values` [..., N] are all the same where `mask`; [..., 1]."""
    highest = values.masked_fill(~mask, -float("inf")).amax(-1, keepdim=True)
    lowest = values.masked_fill(~mask, float("inf")).amin(-1, keepdim=True)
    return highest <= lowest
