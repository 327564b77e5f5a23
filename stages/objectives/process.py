"""Process supervision: every step of a response has a reward (arXiv 2402.03300, section 4.1.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.objectives.graded import Graded, standardise
from stages.objectives.settings import ProcessSettings

if TYPE_CHECKING:
    from torch import Tensor


def process(graded: Graded, settings: ProcessSettings) -> Tensor:
    """The advantage of every token, [groups, G, T], T the longest response.

    The sum of the rewards of the steps that end at the token or after it, each standardised over
    all steps of the group. What follows the last step gets 0. Raises ValueError where no steps were
    rewarded.
    """
    rewards, ends = graded.step_rewards, graded.step_ends
    if rewards is None or ends is None:
        raise ValueError(
            "objective.advantage process needs the rewards of a response's steps, but none came;"
            " use grpo, or a reward that judges steps"
        )
    real = (ends >= 0) & graded.graded.unsqueeze(-1)
    steps = standardise(rewards.flatten(1), real.flatten(1), settings.std).view(rewards.shape)
    longest = int(graded.lengths.max())
    at_ends = steps.new_zeros((*steps.shape[:2], longest)).scatter_add(-1, ends.clamp(min=0), steps)
    return at_ends.flip(-1).cumsum(-1).flip(-1)
