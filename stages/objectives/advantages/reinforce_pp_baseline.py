"""REINFORCE++-baseline: the group's mean, the batch's deviation (arXiv 2501.03262)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from stages.objectives.graded import (
    Graded,
    Whitened,
    centre,
    scale_over_batch,
    standardise_over_tokens,
)
from stages.objectives.registry import advantage

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class ReinforcePPBaselineSettings(Whitened):
    """Group mean baseline, in standard deviations of the batch."""

    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"

    @property
    def zero_variance_teaches(self) -> bool:
        return self.over == "tokens"


@advantage(ReinforcePPBaselineSettings, source="arXiv 2501.03262")
def reinforce_pp_baseline(
    graded: Graded, settings: ReinforcePPBaselineSettings
) -> Float[Tensor, "groups responses"]:
    """Return (R - mean of the group) / (std of that over the batch + 1e-6), [groups, G].

    With `over: tokens`, less the mean of that over all tokens, as verl whitens: where responses of
    unlike length differ in reward, a zero-variance group has an advantage too.
    """
    centred = centre(graded.rewards, graded.mask)
    if settings.over == "tokens":
        return standardise_over_tokens(centred, graded, settings.std)
    return scale_over_batch(centred, graded, settings.std)
