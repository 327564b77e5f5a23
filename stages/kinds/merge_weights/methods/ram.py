"""RAM: changes that several models share are averaged, those of one model alone kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from stages.kinds.merge_weights.methods.tensors import MergedTensor, WeightMethodBase
from stages.objectives.registry import AboveZero, weight_method

if TYPE_CHECKING:
    from torch import Tensor


class RamSettings(WeightMethodBase):
    """Average the changes that several models made, keep those of one alone, or scale them up.

    Reinforcement learning changes few weights, others in every domain: a mean over all models
    would dilute them. `rescale` 0 is RAM, above 0 RAM+. It takes no `weights`.
    """

    name: Literal["ram"] = "ram"
    weighted: ClassVar[bool] = False
    threshold: Annotated[float, Field(ge=0)] = Field(
        default=1e-5, description="a weight has changed if it differs from the start's by more"
    )
    rescale: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="scale of a model's own changes: 1 + rescale min(ratio, max_ratio)"
    )
    max_ratio: AboveZero = Field(
        default=1.0, description="largest ratio of shared to own changes that counts"
    )

    @property
    def changed_above(self) -> float | None:
        return self.threshold if self.rescale > 0 else None


@weight_method(RamSettings, source="RAM, arXiv 2601.13572, as in its authors' code")
def ram(merged: MergedTensor, settings: RamSettings) -> Tensor:
    """Return theta_0 + tau_i s_i where model i alone changed, else + the mean over those that did.

    A model has changed where |tau_i| > threshold. s_i = 1 + rescale min(shared_i / own_i,
    max_ratio) counts, over all tensors, the weights that model i changed with others, and alone.
    The authors' RAM+ is rescale 0.2 and max_ratio 1; mergekit's counts within each tensor.
    """
    import torch

    start = merged.start()
    total, scaled = torch.zeros_like(start), torch.zeros_like(start)
    count = torch.zeros(start.shape, dtype=torch.int32)
    scales = [_scale(overlap, settings) for overlap in merged.overlaps] or [1.0] * len(
        merged.weights
    )
    for scale, (_, vector) in zip(scales, merged.task_vectors(), strict=True):
        changed = vector.abs() > settings.threshold
        count += changed
        vector.mul_(changed)
        total.add_(vector)
        scaled.add_(vector, alpha=scale)
    shared = total.div_(count.clamp(min=1))
    return start.add_(torch.where(count == 1, scaled, shared))


def _scale(overlap: tuple[int, int], settings: RamSettings) -> float:
    shared, alone = overlap
    # Without own changes nothing is scaled.
    return 1 + settings.rescale * min(shared / alone, settings.max_ratio) if alone else 1.0
