"""GDPO: MO-GRPO over the batch's deviation, so as large with many parts (arXiv 2601.05242)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from stages.objectives.advantages.mo_grpo import mo_grpo
from stages.objectives.graded import Graded, Standardised, scale_over_batch
from stages.objectives.registry import advantage

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class GdpoSettings(Standardised):
    """`mo_grpo`, then in standard deviations of the batch."""

    name: Literal["gdpo"] = "gdpo"


@advantage(GdpoSettings, source="arXiv 2601.05242")
def gdpo(graded: Graded, settings: GdpoSettings) -> Float[Tensor, "groups responses"]:
    """Return the advantage `mo_grpo` over (its std in the batch + 1e-6), [groups, G]."""
    return scale_over_batch(mo_grpo(graded, settings), graded, settings.std)
