"""The start plus the models' task vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from stages.kinds.merge_weights.methods.tensors import MergedTensor, WeightMethodBase
from stages.objectives.registry import AboveZero, weight_method

if TYPE_CHECKING:
    from torch import Tensor


class TaskArithmeticSettings(WeightMethodBase):
    """The start plus `lambda` times the sum of what each model learned since."""

    name: Literal["task_arithmetic"] = "task_arithmetic"
    lambda_: AboveZero = Field(
        default=1.0, alias="lambda", description="scale of the sum of task vectors"
    )


@weight_method(TaskArithmeticSettings, source="Task arithmetic, arXiv 2212.04089")
def task_arithmetic(merged: MergedTensor, settings: TaskArithmeticSettings) -> Tensor:
    """Return theta_0 + lambda sum_i w_i tau_i, with tau_i = theta_i - theta_0."""
    return merged.start().add_(merged.sum(), alpha=settings.lambda_)
