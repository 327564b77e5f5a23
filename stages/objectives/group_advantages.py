"""How much better a response was than the others to its prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.objectives.graded import Graded, centre, standardise
from stages.objectives.settings import DrGrpoSettings, GrpoSettings, RlooSettings

if TYPE_CHECKING:
    from torch import Tensor


def grpo(graded: Graded, settings: GrpoSettings) -> Tensor:
    """(R - mean) / (std + 1e-6), [groups, G] (arXiv 2402.03300)."""
    return standardise(graded.rewards, graded.graded, settings.std)


def dr_grpo(graded: Graded, settings: DrGrpoSettings) -> Tensor:
    """R - mean, [groups, G]: without the division, easy and hard prompts weigh alike (arXiv
    2503.20783; so does DeepSeek-V3.2, 2512.02556)."""
    return centre(graded.rewards, graded.graded)


def rloo(graded: Graded, settings: RlooSettings) -> Tensor:
    """R less the mean of the others, [groups, G] (arXiv 2402.14740): n / (n - 1) (R - mean)."""
    count = graded.graded.sum(-1, keepdim=True)
    return centre(graded.rewards, graded.graded) * count / (count - 1).clamp(min=1)
