"""REINFORCE++-baseline: the group's mean, the batch's deviation (arXiv 2501.03262)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from stages.objectives.graded import Graded, Standardised, centre, scale_over_batch
from stages.objectives.registry import advantage

if TYPE_CHECKING:
    from torch import Tensor


class ReinforcePPBaselineSettings(Standardised):
    """Group mean baseline, in standard deviations of the batch."""

    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"


@advantage(ReinforcePPBaselineSettings, source="arXiv 2501.03262")
def reinforce_pp_baseline(graded: Graded, settings: ReinforcePPBaselineSettings) -> Tensor:
    """Return (R - mean of the group) / (std of that over the batch + 1e-6), [groups, G]."""
    return scale_over_batch(centre(graded.rewards, graded.graded), graded, settings.std)
