"""DARE: task vectors with most changes dropped at random, and the others rescaled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from stages.kinds.merge_weights.methods.tensors import (
    MergedTensor,
    WeightMethodBase,
    elected_mean,
    total,
)
from stages.objectives.registry import AboveZero, weight_method

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class DareSettings(WeightMethodBase):
    """Drop changes at random and rescale the others, so that their expected sum is unchanged."""

    name: Literal["dare"] = "dare"
    draws: ClassVar[bool] = True
    drop: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.5, description="probability that a change is dropped"
    )
    then: Literal["linear", "ties"] = Field(
        default="linear",
        description="linear: sum what is left, as task_arithmetic. ties: average what agrees with"
        " the elected sign, as ties without its trimming",
    )
    lambda_: AboveZero = Field(
        default=1.0, alias="lambda", description="scale of the merged task vector"
    )


@weight_method(DareSettings, source="DARE, arXiv 2311.03099")
def dare(merged: MergedTensor, settings: DareSettings) -> Tensor:
    """Return theta_0 + lambda sum_i w_i m_i tau_i / (1 - drop), m_i 0 with probability `drop`.

    With `then: ties` instead theta_0 + lambda times the elected mean of `ties` over these vectors.
    The masks derive from the seed and the names of stage, model and tensor.
    """

    def dropped() -> Iterator[tuple[float, Tensor]]:
        for number, (weight, vector) in enumerate(merged.task_vectors()):
            yield weight, drop(vector, settings.drop, merged.generator(number))

    vector = elected_mean(dropped) if settings.then == "ties" else total(dropped())
    return merged.start().add_(vector, alpha=settings.lambda_)


def drop(vector: Tensor, probability: float, generator: np.random.Generator) -> Tensor:
    """Return the vector with changes dropped and the others divided by 1 - `probability`."""
    import torch

    mask = torch.from_numpy(generator.random(vector.numel()) >= probability)
    return vector.mul_(mask.view_as(vector)).div_(1 - probability)
