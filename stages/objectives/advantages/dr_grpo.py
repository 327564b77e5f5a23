"""Dr. GRPO: the group's mean alone, so easy and hard prompts weigh alike (arXiv 2503.20783)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from stages.objectives.graded import Graded, centre
from stages.objectives.registry import AdvantageBase, advantage

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class DrGrpoSettings(AdvantageBase):
    """Group mean baseline."""

    name: Literal["dr_grpo"] = "dr_grpo"


@advantage(DrGrpoSettings, source="arXiv 2503.20783; DeepSeek-V3.2, 2512.02556")
def dr_grpo(graded: Graded, settings: DrGrpoSettings) -> Float[Tensor, "groups responses"]:
    """Return R - mean of the group, [groups, G].

    Example: of four responses to one prompt, one is right:
        >>> import torch
        >>> rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
        >>> batch = Graded(rewards, mask=rewards >= 0, lengths=torch.tensor([[2, 3, 3, 4]]))
        >>> dr_grpo(batch, DrGrpoSettings())  # less the mean 0.25
        tensor([[ 0.7500, -0.2500, -0.2500, -0.2500]])
    """
    return centre(graded.rewards, graded.mask)
