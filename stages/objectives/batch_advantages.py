"""REINFORCE++: how much better a response was than all others of the batch (arXiv 2501.03262)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.objectives.graded import Graded, Std, centre, scale, standardise
from stages.objectives.settings import ReinforcePPBaselineSettings, ReinforcePPSettings

if TYPE_CHECKING:
    from torch import Tensor


def reinforce_pp(graded: Graded, settings: ReinforcePPSettings) -> Tensor:
    """(R - mean) / (std + 1e-6) over the whole batch, [groups, G].

    A group whose rewards are all alike still learns, from being better or worse than the others.
    With `over: tokens`, mean and deviation are those of R repeated for every token of a response.
    """
    rewards, useful = graded.rewards.flatten(), graded.graded.flatten()
    if settings.over == "responses":
        return standardise(rewards, useful, settings.std).view(graded.rewards.shape)
    lengths = graded.lengths.flatten()[useful].clamp(min=1)
    repeated = rewards[useful].repeat_interleave(lengths)
    every = useful[useful].repeat_interleave(lengths)
    per_token = standardise(repeated, every, settings.std)
    advantages = rewards.new_zeros(rewards.shape)
    advantages[useful] = per_token[lengths.cumsum(0) - 1]
    return advantages.view(graded.rewards.shape)


def reinforce_pp_baseline(graded: Graded, settings: ReinforcePPBaselineSettings) -> Tensor:
    """(R - mean of the group) / (their std over the whole batch + 1e-6), [groups, G]."""
    return over_batch(centre(graded.rewards, graded.graded), graded, settings.std)


def over_batch(centred: Tensor, graded: Graded, std: Std) -> Tensor:
    """What has mean 0 in every group [groups, G], and so in the batch, over its std there."""
    return scale(centred.flatten(), graded.graded.flatten(), std).view(centred.shape)
