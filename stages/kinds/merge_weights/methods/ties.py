"""TIES: trimmed task vectors, of which only those with the elected sign are averaged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from stages.kinds.merge_weights.methods.tensors import MergedTensor, WeightMethodBase, elected_mean
from stages.objectives.registry import AboveZero, weight_method

if TYPE_CHECKING:
    from torch import Tensor

Density = Annotated[float, Field(gt=0, le=1)]


class TiesSettings(WeightMethodBase):
    """Trim each task vector to its largest changes, elect a sign, and average what agrees."""

    name: Literal["ties"] = "ties"
    density: Density = Field(
        default=0.2, description="share of each tensor's changes that is kept, the largest"
    )
    lambda_: AboveZero = Field(
        default=1.0, alias="lambda", description="scale of the merged task vector"
    )


@weight_method(TiesSettings, source="TIES, arXiv 2306.01708")
def ties(merged: MergedTensor, settings: TiesSettings) -> Tensor:
    """Return theta_0 + lambda sum_A w_i tau_i / sum_A w_i, tau_i trimmed to `density` of a tensor.

    A are the models whose w_i tau_i has the sign of sum_i w_i tau_i, where 0 counts as positive.
    The paper trims over all weights of a model; this, as mergekit does, over each tensor. Of equal
    changes at the limit those that come first in the tensor are kept.
    """

    def trimmed() -> Iterator[tuple[float, Tensor]]:
        for weight, vector in merged.task_vectors():
            yield weight, trim(vector, settings.density)

    return merged.start().add_(elected_mean(trimmed), alpha=settings.lambda_)


def trim(vector: Tensor, density: float) -> Tensor:
    """Return the vector with all but its largest changes set to 0; at least one is kept."""
    import torch

    if density == 1 or vector.numel() == 0:
        return vector
    count = max(1, int(density * vector.numel()))
    order = vector.abs().flatten().argsort(descending=True, stable=True)
    mask = torch.zeros(vector.numel(), dtype=torch.bool)
    mask[order[:count]] = True
    return vector.mul_(mask.view_as(vector))
