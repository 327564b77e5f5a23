"""MO-GRPO: every part of the reward on its own scale (arXiv 2509.22047)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from stages.objectives.graded import Graded, Standardised, standardise
from stages.objectives.registry import advantage

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class MoGrpoSettings(Standardised):
    """Each part of the reward as `grpo`, then their weighted sum."""

    name: Literal["mo_grpo"] = "mo_grpo"


@advantage(MoGrpoSettings, source="arXiv 2509.22047")
def mo_grpo(graded: Graded, settings: Standardised) -> Float[Tensor, "groups responses"]:
    """Return the weighted sum over k of (R_k - mean_k) / (std_k + 1e-6), [groups, G].

    Raises:
        ValueError: the rewards have no parts.

    Example: of four responses to one prompt, the first is right and the last is brief:
        >>> import torch
        >>> parts = torch.tensor([[[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 1.0]]])
        >>> weights, mask = torch.tensor([1.0, 0.5]), torch.ones(1, 4, dtype=torch.bool)
        >>> batch = Graded(parts @ weights, mask, mask * 3, parts, weights)
        >>> mo_grpo(batch, MoGrpoSettings())  # each part is 1.5 where it is 1, and -0.5 elsewhere
        tensor([[ 1.2500, -0.7500, -0.7500,  0.2500]])
    """
    if graded.part_rewards is None or graded.weights is None:
        raise ValueError(
            "objective.advantage compares the parts of a reward, but the rewards came without"
            " parts; use grpo, or a reward of several parts"
        )
    part_rewards = graded.part_rewards.movedim(-1, 0)
    weights = graded.weights.view(-1, 1, 1)
    return (
        standardise(part_rewards, graded.mask.expand(part_rewards.shape), settings.std) * weights
    ).sum(0)
