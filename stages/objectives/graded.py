"""The rewards of a batch, as every advantage takes them.

Never imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from stages.objectives.registry import ADVANTAGES, AdvantageBase

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

STD_FLOOR = 1e-6

Std = Literal["population", "sample"]


class Standardised(AdvantageBase):
    """An advantage that is divided by a standard deviation; `std` names which."""

    std: Std = Field(default="sample", description="which standard deviation divides")


class Whitened(Standardised):
    """An advantage in standard deviations of the batch; `over` names of which items."""

    over: Literal["responses", "tokens"] = Field(
        default="responses",
        description="items of mean and standard deviation; tokens, as in verl and OpenRLHF, counts"
        " a response once for each of its tokens",
    )


@dataclass(frozen=True)
class Graded:
    """Groups of at most G responses, one group a prompt; floating point where nothing else is said.

    rewards [groups, G]; mask bool [groups, G], false where there is no response or its reward
    failed: nothing else is read there. lengths int64 [groups, G], in tokens.

    Where rewards have K parts: part_rewards [groups, G, K], unweighted, and weights [K].
    Where the S steps of a response have rewards: step_rewards [groups, G, S], and step_ends int64
    [groups, G, S], the index in the response of a step's last token, or -1.

    Example: two prompts with two responses each; the reward of one response failed:
        >>> import torch
        >>> rewards = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> mask = torch.tensor([[True, True], [True, False]])
        >>> Graded(rewards, mask, lengths=torch.tensor([[5, 2], [3, 4]])).comparable
        tensor([ True, False])
    """

    rewards: Float[Tensor, "groups responses"]
    mask: Bool[Tensor, "groups responses"]
    lengths: Int[Tensor, "groups responses"]
    part_rewards: Float[Tensor, "groups responses parts"] | None = None
    weights: Float[Tensor, " parts"] | None = None
    step_rewards: Float[Tensor, "groups responses steps"] | None = None
    step_ends: Int[Tensor, "groups responses steps"] | None = None

    @property
    def comparable(self) -> Bool[Tensor, " groups"]:
        """Groups [groups], bool, with two graded responses or more."""
        return self.mask.sum(-1) >= 2


def compute_advantages(
    graded: Graded, settings: AdvantageBase
) -> Float[Tensor, "groups responses tokens"]:
    """Return the advantage of every token, [groups, G, T], T = 1 where a response has only one.

    In the dtype of the rewards. 0 for responses that are not graded, and in groups with fewer than
    two graded responses, unless the baseline is the batch's.

    Example: of four responses to one prompt one is right, and the reward of the last failed:
        >>> import torch
        >>> import stages.objectives.loss  # registers the advantages
        >>> rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
        >>> graded = Graded(rewards, torch.tensor([[True, True, True, False]]), rewards.long() + 2)
        >>> settings = stages.objectives.loss.ObjectiveSettings().advantage  # grpo
        >>> compute_advantages(graded, settings).squeeze(-1)  # less 1/3, over 0.5774 + 1e-6
        tensor([[ 1.1547, -0.5773, -0.5773,  0.0000]])
    """
    if not graded.mask.any():
        return graded.rewards.new_zeros((*graded.rewards.shape, 1))
    advantages = ADVANTAGES[settings.name].function(graded, settings)
    tokens = advantages if advantages.dim() == 3 else advantages.unsqueeze(-1)
    useful = graded.mask
    if settings.baseline == "group":
        useful = useful & graded.comparable.unsqueeze(-1)
    return tokens.masked_fill(~useful.unsqueeze(-1), 0.0)


def centre(
    values: Float[Tensor, "*rows items"], mask: Bool[Tensor, "*rows items"]
) -> Float[Tensor, "*rows items"]:
    """Return `values` [..., N] less their mean where `mask`; 0 elsewhere.

    Exactly 0 where all of them are equal: the mean of equal values may round away from them, and
    dividing by their deviation would blow that up.
    """
    values = values.masked_fill(~mask, 0.0)
    mean = values.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return (values - mean).masked_fill(~mask | constant(values, mask), 0.0)


def constant(
    values: Float[Tensor, "*rows items"], mask: Bool[Tensor, "*rows items"]
) -> Bool[Tensor, "*rows 1"]:
    """Return a bool [..., 1], true where `values` [..., N] are all equal where `mask`."""
    highest = values.masked_fill(~mask, -float("inf")).amax(-1, keepdim=True)
    lowest = values.masked_fill(~mask, float("inf")).amin(-1, keepdim=True)
    return highest <= lowest


def standardise(
    values: Float[Tensor, "*rows items"], mask: Bool[Tensor, "*rows items"], std: Std
) -> Float[Tensor, "*rows items"]:
    """Return `values` [..., N] less their mean, over (their std + 1e-6), where `mask`; else 0."""
    return scale(centre(values, mask), mask, std)


def scale(
    centred: Float[Tensor, "*rows items"], mask: Bool[Tensor, "*rows items"], std: Std
) -> Float[Tensor, "*rows items"]:
    """Return `centred` [..., N], of mean 0 where `mask` and 0 elsewhere, over (std + 1e-6)."""
    count = mask.sum(-1, keepdim=True) - (1 if std == "sample" else 0)
    deviation = (centred.square().sum(-1, keepdim=True) / count.clamp(min=1)).sqrt()
    return centred / (deviation + STD_FLOOR)


def standardise_over_tokens(
    values: Float[Tensor, "groups responses"], graded: Graded, std: Std
) -> Float[Tensor, "groups responses"]:
    """Return `values` [groups, G] standardised over the batch, each once for each of its tokens."""
    flat, useful = values.flatten(), graded.mask.flatten()
    # An empty response counts once, as it does over responses.
    lengths = graded.lengths.flatten()[useful].clamp(min=1)
    repeated = flat[useful].repeat_interleave(lengths)
    per_token = standardise(repeated, useful[useful].repeat_interleave(lengths), std)
    last = per_token[lengths.cumsum(0) - 1]  # of each response
    return flat.new_zeros(flat.shape).masked_scatter(useful, last).view(values.shape)


def scale_over_batch(
    centred: Float[Tensor, "groups responses"], graded: Graded, std: Std
) -> Float[Tensor, "groups responses"]:
    """Return `centred` [groups, G], of mean 0 in each group, over (its batch std + 1e-6)."""
    return scale(centred.flatten(), graded.mask.flatten(), std).view(centred.shape)
