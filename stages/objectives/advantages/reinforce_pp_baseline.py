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

    Example: of four responses to one prompt, one is right, and all to another:
        >>> import torch
        >>> rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
        >>> batch = Graded(rewards, mask=rewards >= 0, lengths=torch.full((2, 4), 3))
        >>> settings = ReinforcePPBaselineSettings()
        >>> reinforce_pp_baseline(batch, settings)  # 0.75 and -0.25 over 0.3273
        tensor([[ 2.2913, -0.7638, -0.7638, -0.7638],
                [ 0.0000,  0.0000,  0.0000,  0.0000]])
    """
    centred = centre(graded.rewards, graded.mask)
    if settings.over == "tokens":
        return standardise_over_tokens(centred, graded, settings.std)
    return scale_over_batch(centred, graded, settings.std)
