"""Weights of responses within their group, whose other members may be on other ranks."""

from __future__ import annotations

import torch

from parallel.batch import MicroBatch
from parallel.device import device
from parallel.distributed import sum_over_data
from parallel.sample import Sample
from stages.objectives.aggregation import sequence_means

SPREAD = 9.0  # divides the standard score of a length (arXiv 2510.06870)
# No response counts more than ten times for its certainty: EDGE's formula has no bound, and a
# response that was certain at every token would divide by 0.
LEAST_RELATIVE_ENTROPY = 0.1


class LengthWeights:
    """The weights by length of one update's responses; their exponent learns from its loss."""

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
        """Return the weights of a micro-batch of the update, [B]."""
        weights = length_weights(self._lengths, self._groups, self._exponent)
        places = [self._places[id(sample)] for sample in part.samples]
        return weights[torch.tensor(places, dtype=torch.int64, device=weights.device)]

    def gradient(self) -> float:
        """Return the derivative of the update's loss by the exponent. Collective."""
        own = self._exponent.grad
        return sum_over_data({"gradient": 0.0 if own is None else own.item()})["gradient"]


def length_weights(
    lengths: torch.Tensor, groups: torch.Tensor, exponent: torch.Tensor
) -> torch.Tensor:
    """Return f_i = G softmax(h^lambda), h_i = 1 + z_i / 9, of n responses: [n].

    Lambda-GRPO (arXiv 2510.06870). z_i is the standard score of a response's length within its
    group, in population standard deviations, and 0 where all are equally long; the softmax and its
    mean are over the G responses of the group. `lengths` [n] floating point, in tokens; `groups`
    int64 [n], the group of each, from 0; `exponent`, lambda, a scalar with gradient. At 0 every
    weight is 1, above it long responses count for more, below it short ones.
    """
    count = _sums(lengths.new_ones(lengths.shape), groups)[groups]
    centred = lengths - _sums(lengths, groups)[groups] / count
    deviation = (_sums(centred.square(), groups)[groups] / count).sqrt()
    score = centred / deviation.where(deviation > 0, 1.0)
    # In large groups an outlier's h would fall below 0, which has no real power.
    logits = (1 + score / SPREAD).clamp(min=1e-3) ** exponent
    powers = (logits - _highest(logits.detach(), groups)[groups]).exp()
    return count * powers / _sums(powers, groups)[groups]


def scale_by_entropy(samples: list[Sample], parts: list[MicroBatch]) -> None:
    """Divide the advantages of this rank's micro-batches of `samples` by relative entropies.

    Only learned tokens count. Collective.
    """
    sums = {str(sample.group): 0.0 for sample in samples}
    counts = dict.fromkeys(sums, 0)
    for sample in samples:
        counts[str(sample.group)] += bool(len(sample.learned))
    measured = []
    for part in parts:
        if part.old_entropies is None:  # not on the last pipeline stage
            continue
        entropies = sequence_means(part.old_entropies, part.mask)
        measured.append((part, entropies))
        for sample, entropy in zip(part.samples, entropies.tolist(), strict=True):
            sums[str(sample.group)] += entropy
    sums = sum_over_data(sums)
    for part, entropies in measured:
        names = [str(sample.group) for sample in part.samples]
        of_group = entropies.new_tensor([sums[name] / max(counts[name], 1) for name in names])
        part.advantages = edge(part.advantages, entropies, of_group)


def edge(
    advantages: torch.Tensor, entropies: torch.Tensor, group_means: torch.Tensor
) -> torch.Tensor:
    """Return A_i / H_i, H_i the response's mean token entropy over its group's mean (EDGE).

    `advantages` [B, T]; `entropies` and `group_means` [B], in nats, of the policy that sampled.
    Source: arXiv 2507.21848.
    """
    relative = entropies / group_means.clamp(min=1e-12)
    return advantages / relative.clamp(min=LEAST_RELATIVE_ENTROPY).unsqueeze(-1)


def _sums(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    return values.new_zeros(_size(groups)).index_add(0, groups, values)


def _highest(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    start = values.new_full((_size(groups),), -float("inf"))
    return start.scatter_reduce(0, groups, values, "amax")


def _size(groups: torch.Tensor) -> int:
    return int(groups.max()) + 1 if len(groups) else 0
