"""Group Filtered Policy Optimization: sample many, learn from the concise (arXiv 2508.09726)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from parallel.settings import MOST
from stages.objectives.graded import Graded, Standardised, standardise
from stages.objectives.registry import advantage

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class GfpoSettings(Standardised):
    """`grpo` among the kept responses of a group; 0 for the others."""

    name: Literal["gfpo"] = "gfpo"
    keep: Annotated[int, Field(ge=2, le=MOST)] = Field(
        default=4, description="responses of each group"
    )
    by: Literal["length", "reward_per_token"] = Field(
        default="length", description="keep the shortest, or those with the most reward per token"
    )

    def violations(self, group_size: int) -> Iterator[tuple[str, str]]:
        if self.keep > group_size:
            yield "keep", f"{self.keep} is more than sampling.group_size = {group_size}"


@advantage(GfpoSettings, source="arXiv 2508.09726")
def gfpo(graded: Graded, settings: GfpoSettings) -> Float[Tensor, "groups responses"]:
    """Return the advantage `grpo` among the kept responses of each group, else 0, [groups, G].

    Of equal responses the first are kept.

    Example: of four responses to one prompt, one is right:
        >>> import torch
        >>> rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
        >>> batch = Graded(rewards, mask=rewards >= 0, lengths=torch.tensor([[2, 3, 3, 4]]))
        >>> gfpo(batch, GfpoSettings(keep=2))  # the shortest: rewards 1 and 0, of deviation 0.7071
        tensor([[ 0.7071, -0.7071,  0.0000,  0.0000]])
    """
    merit = -graded.lengths.to(graded.rewards.dtype)
    if settings.by == "reward_per_token":
        merit = graded.rewards / graded.lengths.clamp(min=1)
    # An ungraded response must not take the place of a graded one.
    merit = merit.masked_fill(~graded.mask, -float("inf"))
    order = merit.argsort(dim=-1, descending=True, stable=True)
    # The argsort of the order is the rank of each response.
    mask = (order.argsort(dim=-1) < settings.keep) & graded.mask
    return standardise(graded.rewards, mask, settings.std)
