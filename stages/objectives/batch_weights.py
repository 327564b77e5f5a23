"""What a response weighs among those of its group, which other ranks may hold."""

from __future__ import annotations

import torch

from parallel.batch import MicroBatch
from parallel.device import device
from parallel.distributed import sum_over_data
from parallel.sample import Sample
from stages.objectives.aggregation import sequence_means
from stages.objectives.edge import edge
from stages.objectives.length_weights import length_weights


class LengthWeights:
    """What the responses of one update weigh by their length; learns from its loss."""

    def __init__(self, samples: list[Sample], exponent: float) -> None:
        self._exponent = torch.tensor(
            exponent, dtype=torch.float32, device=device(), requires_grad=True
        )
        lengths = [float(len(sample.response)) for sample in samples]
        self._lengths = torch.tensor(lengths, device=device())
        self._groups = torch.tensor(
            [sample.group for sample in samples], dtype=torch.int64, device=device()
        )
        self._places = {id(sample): place for place, sample in enumerate(samples)}

    def __call__(self, part: MicroBatch) -> torch.Tensor:
        """Those of a micro-batch of the update, [B]."""
        weights = length_weights(self._lengths, self._groups, self._exponent)
        places = [self._places[id(sample)] for sample in part.samples]
        return weights[torch.tensor(places, dtype=torch.int64, device=weights.device)]

    def gradient(self) -> float:
        """The derivative of the update's loss by the exponent. Collective."""
        own = self._exponent.grad
        return sum_over_data({"gradient": 0.0 if own is None else own.item()})["gradient"]


def scale_by_entropy(samples: list[Sample], parts: list[MicroBatch]) -> None:
    """Divide the advantages of this rank's micro-batches of `samples` by their relative entropies,
    which are those of what is learned. Collective."""
    sums = {str(sample.group): 0.0 for sample in samples}
    counts = dict.fromkeys(sums, 0)
    for sample in samples:
        counts[str(sample.group)] += bool(len(sample.learned))
    judged = []
    for part in parts:
        if part.old_entropies is None:  # not on the last pipeline stage
            continue
        entropies = sequence_means(part.old_entropies, part.mask)
        judged.append((part, entropies))
        for sample, entropy in zip(part.samples, entropies.tolist(), strict=True):
            sums[str(sample.group)] += entropy
    sums = sum_over_data(sums)
    for part, entropies in judged:
        names = [str(sample.group) for sample in part.samples]
        of_group = entropies.new_tensor([sums[name] / max(counts[name], 1) for name in names])
        part.advantages = edge(part.advantages, entropies, of_group)
