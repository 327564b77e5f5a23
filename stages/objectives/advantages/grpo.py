"""GRPO: the group's mean and standard deviation (arXiv 2402.03300)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from stages.objectives.graded import Graded, Standardised, standardise
from stages.objectives.registry import advantage

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class GrpoAdvantageSettings(Standardised):
    """Group mean baseline, in standard deviations of the group."""

    name: Literal["grpo"] = "grpo"


@advantage(GrpoAdvantageSettings, source="arXiv 2402.03300")
def grpo(graded: Graded, settings: GrpoAdvantageSettings) -> Float[Tensor, "groups responses"]:
    """Return (R - mean of the group) / (std of the group + 1e-6), [groups, G].

    Example: of four responses to one prompt, one is right:
        >>> import torch
        >>> rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
        >>> batch = Graded(rewards, mask=rewards >= 0, lengths=torch.tensor([[2, 3, 3, 4]]))
        >>> grpo(batch, GrpoAdvantageSettings())  # less the mean 0.25, over the deviation 0.5
        tensor([[ 1.5000, -0.5000, -0.5000, -0.5000]])
    """
    return standardise(graded.rewards, graded.mask, settings.std)
