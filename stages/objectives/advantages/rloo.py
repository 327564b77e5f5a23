"""RLOO: the mean of the other responses of the group (arXiv 2402.14740)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from stages.objectives.graded import Graded, centre
from stages.objectives.registry import AdvantageBase, advantage

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class RlooSettings(AdvantageBase):
    """Leave-one-out group baseline."""

    name: Literal["rloo"] = "rloo"


@advantage(RlooSettings, source="arXiv 2402.14740")
def rloo(graded: Graded, settings: RlooSettings) -> Float[Tensor, "groups responses"]:
    """Return R - mean of the others of the group = n / (n - 1) (R - mean), [groups, G].

    Example: of four responses to one prompt, one is right:
        >>> import torch
        >>> rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
        >>> batch = Graded(rewards, mask=rewards >= 0, lengths=torch.tensor([[2, 3, 3, 4]]))
        >>> rloo(batch, RlooSettings())  # 1 less 0; 0 less the mean 1/3 of the other three
        tensor([[ 1.0000, -0.3333, -0.3333, -0.3333]])
    """
    count = graded.mask.sum(-1, keepdim=True)
    return centre(graded.rewards, graded.mask) * count / (count - 1).clamp(min=1)
