"""REINFORCE++: the batch's mean and standard deviation (arXiv 2501.03262)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from stages.objectives.graded import Graded, Whitened, standardise, standardise_over_tokens
from stages.objectives.registry import advantage

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class ReinforcePPSettings(Whitened):
    """Batch mean baseline, in standard deviations of the batch; groups of one are enough."""

    baseline: ClassVar[Literal["batch"]] = "batch"

    name: Literal["reinforce_pp"] = "reinforce_pp"


@advantage(ReinforcePPSettings, source="arXiv 2501.03262")
def reinforce_pp(
    graded: Graded, settings: ReinforcePPSettings
) -> Float[Tensor, "groups responses"]:
    """Return (R - mean) / (std + 1e-6) over the whole batch, [groups, G].

    A zero-variance group still learns, from being better or worse than the others. With `over:
    tokens`, mean and std are of R repeated for every token of a response.

    Example: of four responses to one prompt, one is right, and all to another:
        >>> import torch
        >>> rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
        >>> batch = Graded(rewards, mask=rewards >= 0, lengths=torch.full((2, 4), 3))
        >>> reinforce_pp(batch, ReinforcePPSettings())  # less the mean 0.625, over 0.5175
        tensor([[ 0.7246, -1.2076, -1.2076, -1.2076],
                [ 0.7246,  0.7246,  0.7246,  0.7246]])
    """
    rewards, useful = graded.rewards.flatten(), graded.mask.flatten()
    if settings.over == "responses":
        return standardise(rewards, useful, settings.std).view(graded.rewards.shape)
    return standardise_over_tokens(graded.rewards, graded, settings.std)
