"""The weighted mean of the models' weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from stages.kinds.merge_weights.methods.tensors import MergedTensor, WeightMethodBase, total
from stages.objectives.registry import weight_method

if TYPE_CHECKING:
    from torch import Tensor


class AverageSettings(WeightMethodBase):
    """The weighted mean of the models; it reads no start."""

    name: Literal["average"] = "average"
    needs_start: ClassVar[bool] = False


@weight_method(AverageSettings, source="Model soups, arXiv 2203.05482")
def average(merged: MergedTensor, settings: AverageSettings) -> Tensor:
    """Return sum_i w_i theta_i / sum_i w_i."""
    return total(merged.models()).div_(sum(merged.weights))
