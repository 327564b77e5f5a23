"""Rewards of several parts, each on a scale of its own until it is compared within its group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.objectives.batch_advantages import over_batch
from stages.objectives.graded import Graded, Std, standardise
from stages.objectives.settings import GdpoSettings, MoGrpoSettings

if TYPE_CHECKING:
    from torch import Tensor


def mo_grpo(graded: Graded, settings: MoGrpoSettings) -> Tensor:
    """The weighted sum over k of (R_k - mean_k) / (std_k + 1e-6), [groups, G] (arXiv 2509.22047).

    The part that varies most does not drown the others. Raises ValueError where rewards have no
    parts.
    """
    return _sum_of_parts(graded, settings.std)


def gdpo(graded: Graded, settings: GdpoSettings) -> Tensor:
    """The same over (its std in the whole batch + 1e-6), [groups, G] (arXiv 2601.05242).

    So its size does not grow with the number of parts.
    """
    return over_batch(_sum_of_parts(graded, settings.std), graded, settings.std)


def _sum_of_parts(graded: Graded, std: Std) -> Tensor:
    if graded.parts is None or graded.weights is None:
        raise ValueError(
            "objective.advantage compares the parts of a reward one by one, but the rewards came"
            " without parts; use grpo, or a reward of several parts"
        )
    parts = graded.parts.movedim(-1, 0)
    weights = graded.weights.view(-1, 1, 1)
    return (standardise(parts, graded.graded.expand(parts.shape), std) * weights).sum(0)
