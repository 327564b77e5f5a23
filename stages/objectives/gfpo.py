"""Group Filtered Policy Optimization: sample many, learn from the concise (arXiv 2508.09726)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.objectives.graded import Graded, standardise
from stages.objectives.settings import GfpoSettings

if TYPE_CHECKING:
    from torch import Tensor


def gfpo(graded: Graded, settings: GfpoSettings) -> Tensor:
    """The advantage `grpo` among the kept responses of each group, and 0 elsewhere, [groups, G]."""
    return standardise(graded.rewards, kept(graded, settings), settings.std)


def kept(graded: Graded, settings: GfpoSettings) -> Tensor:
    """Which `settings.keep` responses of each group are learned from, bool [groups, G].

    Of responses that are equally good the first ones.
    """
    merit = -graded.lengths.to(graded.rewards.dtype)
    if settings.by == "reward_per_token":
        merit = graded.rewards / graded.lengths.clamp(min=1)
    merit = merit.masked_fill(~graded.graded, -float("inf"))
    order = merit.argsort(dim=-1, descending=True, stable=True)
    return (order.argsort(dim=-1) < settings.keep) & graded.graded
