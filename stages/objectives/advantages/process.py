"""Process supervision: every step of a response has a reward (arXiv 2402.03300, section 4.1.3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from stages.objectives.graded import Graded, Standardised, standardise
from stages.objectives.registry import advantage

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

ROUNDING = 1e-9  # of a reward that equals the mean of its steps


class ProcessSettings(Standardised):
    """Each step of a response by its own reward, against all steps of the group."""

    per_token: ClassVar[bool] = True
    needs_step_rewards: ClassVar[bool] = True

    name: Literal["process"] = "process"


@advantage(ProcessSettings, source="arXiv 2402.03300, section 4.1.3")
def process(graded: Graded, settings: ProcessSettings) -> Float[Tensor, "groups responses tokens"]:
    """Return the summed rewards of the steps that end at a token or later, [groups, G, T].

    Each is standardised over all steps of the group. What else the response earned (its reward less
    the mean of its steps) is standardised over the group and added to every token, as in `grpo`.

    Raises:
        ValueError: the steps have no rewards.

    Example: four responses of two tokens, each token a step; one step of the first is right:
        >>> import torch
        >>> steps = torch.tensor([[[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]])
        >>> mask, ends = torch.ones(1, 4, dtype=torch.bool), torch.tensor([0, 1]).expand(1, 4, 2)
        >>> batch = Graded(steps.mean(-1), mask, mask * 2, step_rewards=steps, step_ends=ends)
        >>> process(batch, ProcessSettings())[0, :2]  # a right step is 2.4749, a wrong one -0.3536
        tensor([[ 2.1213, -0.3536],
                [-0.7071, -0.3536]])
    """
    rewards, ends = graded.step_rewards, graded.step_ends
    if rewards is None or ends is None:
        raise ValueError(
            "objective.advantage process needs the rewards of a response's steps, but none came;"
            " use grpo, or a reward that scores steps"
        )
    real = (ends >= 0) & graded.mask.unsqueeze(-1)
    steps = standardise(rewards.flatten(1), real.flatten(1), settings.std).view(rewards.shape)
    longest = int(graded.lengths.max())
    # An end of -1 marks no step: its reward is 0, so that it may be added to token 0.
    at_ends = steps.new_zeros((*steps.shape[:2], longest)).scatter_add(-1, ends.clamp(min=0), steps)
    count = real.sum(-1).clamp(min=1)
    remainder = graded.rewards - rewards.masked_fill(~real, 0.0).sum(-1) / count
    # Rounding that is all a group differs in would be blown up to a deviation of 1.
    remainder = remainder.masked_fill(remainder.abs() < ROUNDING, 0.0)
    else_earned = standardise(remainder, graded.mask, settings.std)
    return at_ends.flip(-1).cumsum(-1).flip(-1) + else_earned.unsqueeze(-1)
