"""Process supervision: every step of a response has a reward (arXiv 2402.03300, section 4.1.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.objectives.graded import Graded, standardise
from stages.objectives.settings import ProcessSettings

if TYPE_CHECKING:
    from torch import Tensor


ROUNDING = 1e-9  # of a reward that is the mean of its steps and nothing else


def process(graded: Graded, settings: ProcessSettings) -> Tensor:
    """The advantage of every token, [groups, G, T], T the longest response.

    The sum of the rewards of the steps that end at the token or after it, each standardised over
    all steps of the group, and of what else the response earned (its reward less the mean of its
    steps), standardised over the group, which every token gets as in `grpo`. Raises ValueError
    where no steps were rewarded.
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
    count = real.sum(-1).clamp(min=1)
    rest = graded.rewards - rewards.masked_fill(~real, 0.0).sum(-1) / count
    rest = rest.masked_fill(rest.abs() < ROUNDING, 0.0)
    else_earned = standardise(rest, graded.graded, settings.std)
    return at_ends.flip(-1).cumsum(-1).flip(-1) + else_earned.unsqueeze(-1)
