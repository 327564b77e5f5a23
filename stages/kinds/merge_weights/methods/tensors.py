"""One tensor of all the models of a weight-space merge, and the base of the methods' settings.

A method reads a tensor's models one after the other, as often as it needs to, and adds up in
float64: its memory does not grow with the number of models. Never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import model_serializer

from parallel.settings import Settings

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor


class WeightMethodBase(Settings):
    """The base of a method's settings; the class variables say what it needs.

    A method without keys is written as its plain name.
    """

    if TYPE_CHECKING:
        name: str
    needs_start: ClassVar[bool] = True  # the model that all others started from
    draws: ClassVar[bool] = False
    weighted: ClassVar[bool] = True  # it reads the models' weights

    @property
    def changed_above(self) -> float | None:
        """The threshold that `MergedTensor.overlaps` counts with; None where it reads none."""
        return None

    @model_serializer(mode="wrap")
    def _plain_name(self, keys: Any) -> Any:
        dumped = keys(self)
        return dumped["name"] if len(dumped) == 1 else dumped


@dataclass(frozen=True)
class MergedTensor:
    """A tensor of N models, and of the start where the method needs one.

    `read(i)` returns model i's, `read(-1)` the start's, each a new tensor in float64. `weights`
    are the models'. `generator(i)` draws for model i: the same numbers whenever it is called.
    `overlaps[i]` counts, over all tensors of the model, where model i and others differ from the
    start, and where model i alone does.
    """

    read: Callable[[int], Tensor]
    weights: Sequence[float]
    generator: Callable[[int], np.random.Generator]
    overlaps: Sequence[tuple[int, int]] = ()

    def start(self) -> Tensor:
        """Return the start's tensor."""
        return self.read(-1)

    def models(self) -> Iterator[tuple[float, Tensor]]:
        """Yield each model's weight and its tensor."""
        for number, weight in enumerate(self.weights):
            yield weight, self.read(number)

    def task_vectors(self) -> Iterator[tuple[float, Tensor]]:
        """Yield each model's weight and the difference of its tensor from the start's."""
        start = self.start()
        for weight, tensor in self.models():
            yield weight, tensor.sub_(start)

    def sum(self, weighted: bool = True) -> Tensor:
        """Return the sum of the task vectors, each times its model's weight where `weighted`."""
        return total(
            (weight if weighted else 1.0, vector) for weight, vector in self.task_vectors()
        )


def total(vectors: Iterable[tuple[float, Tensor]]) -> Tensor:
    """Return the sum of vectors times their weights; the first one's memory is reused."""
    pairs = iter(vectors)
    weight, vector = next(pairs)
    weighted_sum = vector.mul_(weight)
    for weight, vector in pairs:
        weighted_sum.add_(vector, alpha=weight)
    return weighted_sum


def elected_mean(
    vectors: Callable[[], Iterable[tuple[float, Tensor]]],
    weights: Sequence[float] | None = None,
    least: float = 0.0,
) -> Tensor:
    """Return the weighted mean, at each position, of the vectors that have the elected sign.

    That is the sign of the sum of w_i v_i, where 0 counts as positive; a v_i of 0 has no sign.
    `weights` replace the w_i in the mean, but not in the election. A sum of weights below `least`
    counts as `least`, and a mean of none is 0.
    """
    import torch

    elected = total(vectors()) >= 0
    mean, divisor = torch.zeros(0), torch.zeros(0)
    for number, (weight, vector) in enumerate(vectors()):
        counted = weight if weights is None else weights[number]
        agrees = torch.where(elected, vector * weight > 0, vector * weight < 0).double()
        share = agrees.mul_(counted)
        mean = vector.mul_(share) if number == 0 else mean.add_(vector.mul_(share))
        divisor = share if number == 0 else divisor.add_(share)
    divisor = divisor.clamp_(min=least)
    return torch.where(divisor == 0, 0.0, mean.div_(divisor))


def overlap_counts(merged: MergedTensor, threshold: float) -> Tensor:
    """Return how often each of N models changed a weight with others, and alone; int64 [N, 2]."""
    import torch

    count = torch.zeros((), dtype=torch.int32)
    for _, vector in merged.task_vectors():
        count = count + (vector.abs() > threshold)
    rows = []
    for _, vector in merged.task_vectors():
        changed = vector.abs() > threshold
        rows.append([int((changed & (count > 1)).sum()), int((changed & (count == 1)).sum())])
    return torch.tensor(rows, dtype=torch.int64)
