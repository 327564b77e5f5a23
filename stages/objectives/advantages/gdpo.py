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
    """Return the advantage `mo_grpo` over (its std in the batch + 1e-6), [groups, G].

    Example: of four responses to one prompt, the first is right and the last is brief:
        >>> import torch
        >>> parts = torch.tensor([[[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 1.0]]])
        >>> weights, mask = torch.tensor([1.0, 0.5]), torch.ones(1, 4, dtype=torch.bool)
        >>> batch = Graded(parts @ weights, mask, mask * 3, parts, weights)
        >>> gdpo(batch, GdpoSettings())  # mo_grpo's 1.25, -0.75, -0.75, 0.25 over 0.9574
        tensor([[ 1.3056, -0.7833, -0.7833,  0.2611]])
    """
    return scale_over_batch(mo_grpo(graded, settings), graded, settings.std)
