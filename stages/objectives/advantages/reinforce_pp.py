"""REINFORCE++: the batch's mean and standard deviation (arXiv 2501.03262)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from stages.objectives.graded import Graded, Standardised, standardise
from stages.objectives.registry import advantage

if TYPE_CHECKING:
    from torch import Tensor


class ReinforcePPSettings(Standardised):
    """Batch mean baseline, in standard deviations of the batch; groups of one are enough."""

    baseline: ClassVar[Literal["batch"]] = "batch"

    name: Literal["reinforce_pp"] = "reinforce_pp"
    over: Literal["responses", "tokens"] = Field(
        default="responses",
        description="items of mean and standard deviation; tokens, as in verl and OpenRLHF, counts"
        " a response once for each of its tokens",
    )


@advantage(ReinforcePPSettings, source="arXiv 2501.03262")
def reinforce_pp(graded: Graded, settings: ReinforcePPSettings) -> Tensor:
    """Return (R - mean) / (std + 1e-6) over the whole batch, [groups, G].

    A zero-variance group still learns, from being better or worse than the others. With `over:
    tokens`, mean and std are of R repeated for every token of a response.
    """
    rewards, useful = graded.rewards.flatten(), graded.graded.flatten()
    if settings.over == "responses":
        return standardise(rewards, useful, settings.std).view(graded.rewards.shape)
    lengths = graded.lengths.flatten()[useful].clamp(min=1)
    repeated = rewards[useful].repeat_interleave(lengths)
    every = useful[useful].repeat_interleave(lengths)
    per_token = standardise(repeated, every, settings.std)
    last = per_token[lengths.cumsum(0) - 1]  # of each response
    return rewards.new_zeros(rewards.shape).masked_scatter(useful, last).view(graded.rewards.shape)
