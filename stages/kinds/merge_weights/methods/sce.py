"""SCE: the changes on which models differ most, weighted by their energy, where signs agree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from stages.kinds.merge_weights.methods.tensors import MergedTensor, WeightMethodBase, elected_mean
from stages.objectives.registry import weight_method

if TYPE_CHECKING:
    from torch import Tensor

NO_ENERGY = 1e-6  # of mergekit, as its floor of the weights' sum


class SceSettings(WeightMethodBase):
    """Select changes by their variance over models, calculate weights, erase minority signs.

    It calculates its own weights, and so takes no `weights`.
    """

    name: Literal["sce"] = "sce"
    weighted: ClassVar[bool] = False
    density: Annotated[float, Field(gt=0, le=1)] = Field(
        default=1.0,
        description="share of each tensor's changes with a variance over models above 0 that is"
        " selected, the largest",
    )


@weight_method(SceSettings, source="SCE (FuseChat 3.0), arXiv 2408.07990, as in mergekit")
def sce(merged: MergedTensor, settings: SceSettings) -> Tensor:
    """Return theta_0 + sum_A e_i s tau_i / sum_A e_i for each tensor.

    s selects the share `density` of the changes with the largest variance over models. e_i is the
    mean square of s tau_i over the sum of all models', or 1 / N where that is below 1e-6. A are the
    models with s tau_i of the sign of sum_i s tau_i. A sum of e_i below 1e-6 counts as 1e-6.
    """
    selected = _selection(merged, settings.density)

    def vectors() -> Iterator[tuple[float, Tensor]]:
        for _, vector in merged.task_vectors():
            yield 1.0, vector if selected is None else vector.mul_(selected)

    energies = [float(vector.square_().mean()) for _, vector in vectors()]
    whole = sum(energies)
    even = 1 / len(energies)
    weights = [energy / whole if whole >= NO_ENERGY else even for energy in energies]
    return merged.start().add_(elected_mean(vectors, weights, NO_ENERGY))


def _selection(merged: MergedTensor, density: float) -> Tensor | None:
    """Return a mask of the changes with the largest variance over models; None selects all."""
    import torch

    if density == 1:
        return None
    mean = merged.sum(weighted=False).div_(len(merged.weights))
    variance = torch.zeros_like(mean)
    for _, vector in merged.task_vectors():
        variance.add_(vector.sub_(mean).square_())
    count = int(density * int(variance.count_nonzero()))
    order = variance.flatten().argsort(descending=True, stable=True)
    mask = torch.zeros(variance.numel(), dtype=torch.bool)
    mask[order[:count]] = True
    return mask.view_as(variance)
