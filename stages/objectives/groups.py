"""Prompt groups, the advantages of their samples, and the weights of responses in their group."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from parallel.batch import MicroBatch
from parallel.distributed import sum_over_data
from parallel.machine.device import device
from parallel.sample import Sample
from stages.data.problem import Problem
from stages.objectives.graded import Graded, compute_advantages
from stages.objectives.registry import AdvantageBase
from stages.objectives.surrogate import sequence_means
from stages.rewards.reward import Grade, RewardBase, RewardError, solved

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

SPREAD = 9.0  # divides the standard score of a length (arXiv 2510.06870)
# No response counts more than ten times for its certainty: EDGE's formula has no bound, and a
# response that was certain at every token would divide by 0.
LEAST_RELATIVE_ENTROPY = 0.1

Place = tuple[int, int]  # a sample's group and its number in the group


@dataclass(eq=False)
class Group:
    """All samples of one prompt; sample i is sampled with seed + i.

    `dispatch_version` is the version of the weights that the engines had when it was requested.
    `ended` counts the groups that were complete before this one; None while samples are missing.
    `grades` are the pending grades of its samples, where they are wanted. Once it is `graded`, its
    samples have their rewards, `failures` says why some have none, and `watch_failures` why some
    have no value of a reward of weight 0.

    Example: two samples of a prompt, requested while the engines had weights 12:
        >>> problem = Problem("sums", 0, "2 + 2 =", "4")
        >>> group = Group(problem, seed=8, slots=[None, None], dispatch_version=12)
        >>> [group.seed + number for number, sample in enumerate(group.slots) if sample is None]
        [8, 9]

    Waits for: an engine's response in every slot, then the grades of all of them.
    Unblocked by: `StageEngines.wait`, which fills slots as responses arrive and sets `ended` with
    the last one; then `graded`, once every grade in `grades` is done.
    """

    problem: Problem
    seed: int
    slots: list[Sample | None]
    dispatch_version: int = 0
    ended: int | None = None
    grades: list[Future[Grade] | None] | None = None
    graded: bool = False
    failures: list[str] = field(default_factory=list)
    watch_failures: list[str] = field(default_factory=list)

    @property
    def samples(self) -> list[Sample]:
        """The samples of a complete group."""
        assert self.ended is not None
        return [sample for sample in self.slots if sample is not None]

    @property
    def weight_version(self) -> int:
        """The version of the oldest weights that sampled any of its tokens."""
        return min(sample.weight_version for sample in self.samples)

    @property
    def zero_variance(self) -> bool:
        """True where all rewards are equal, not counting samples whose reward failed."""
        return len({sample.reward for sample in self.samples if sample.reward is not None}) <= 1


@dataclass
class Batch:
    """The groups that a step trains on, in the order of their prompts, and what else it sampled.

    Groups are `replaced` that have nothing to learn from; `too_old` counts dropped samples. Of all
    of these, `failures` samples have no reward; a reward of weight 0 failed `watch_failures` times.

    Example: a step on 2 prompts of 4 samples; a third group had equal rewards:
        groups = [first, third]   replaced = [second]   sampled = [first, third, second]
        too_old = 1 (dropped)     failures = 2 (of 12 samples, no reward)
    """

    groups: list[Group]
    replaced: list[Group]
    too_old: int
    failures: int
    watch_failures: int

    @property
    def sampled(self) -> list[Group]:
        """All groups that were not too old."""
        return [*self.groups, *self.replaced]


def rewarded(group: Group) -> list[Sample]:
    """Return the samples of a group that have a reward."""
    return [sample for sample in group.samples if sample.reward is not None]


def is_right(sample: Sample, rewards: Mapping[str, RewardBase]) -> bool:
    """Return true where a graded sample solves its problem, as evaluation counts it."""
    return sample.reward_parts is not None and solved(rewards, sample.reward_parts)


def groups_of(problems: list[Problem], size: int, seed: int) -> list[Group]:
    """Return a group of `size` for each problem; no two samples share a seed.

    Example: no sample of the first group has the seed of one of the second:
        >>> problems = [Problem("sums", number, "2 + 2 =", "4") for number in range(2)]
        >>> [(group.seed, len(group.slots)) for group in groups_of(problems, size=4, seed=8)]
        [(8, 4), (12, 4)]
    """
    return [
        Group(problem, seed + index * size, [None] * size) for index, problem in enumerate(problems)
    ]


def assign_advantages(
    groups: list[Group],
    settings: AdvantageBase,
    weights: Mapping[str, float] | None = None,
    first_number: int = 0,
) -> list[list[Sample]]:
    """Set the advantage of every graded sample, and return them as `graded_samples` does.

    `weights` are those of a reward's parts, by name; without them each weighs 1.

    Raises:
        RewardError: the advantage compares steps, and a graded sample has none.
    """
    _check_steps(groups, settings)
    advantages = compute_advantages(graded(groups, weights), settings).float().numpy()
    for number, group in enumerate(groups):
        for sample, values in zip(group.samples, advantages[number], strict=False):
            if advantages.shape[-1] > 1:
                sample.advantages = values = values[: len(sample.response)]
            sample.advantage = float(values.mean())
    return graded_samples(groups, first_number)


def has_zero_advantages(
    group: Group,
    settings: AdvantageBase,
    weights: Mapping[str, float] | None = None,
    mask_truncated: bool = False,
) -> bool:
    """Return true where no learned token of a graded group can have an advantage.

    Advantages that are not of the group alone are not known yet: only a group without learned
    responses is then without any. With `mask_truncated`, truncated responses are not learned.
    """
    learned = [sample.finished or not mask_truncated for sample in group.samples]
    if mask_truncated and not any(learned):
        return True
    if settings.zero_variance_teaches:
        return False
    _check_steps([group], settings)
    advantages = compute_advantages(graded([group], weights), settings)[0]
    return not advantages[: len(learned)][learned].any()


def taught_nothing(group: Group) -> bool:
    """Return true where no learned token of a group has an advantage, once they are assigned."""
    return not any(
        sample.advantage if sample.advantages is None else sample.advantages[sample.learned].any()
        for sample in group.samples
        if len(sample.learned)
    )


def graded_samples(groups: list[Group], first_number: int = 0) -> list[list[Sample]]:
    """Return the graded samples of each group; number all samples' groups from `first_number`."""
    for number, group in enumerate(groups, first_number):
        for sample in group.samples:
            sample.group = number
    return [[sample for sample in group.samples if sample.reward is not None] for group in groups]


def graded(groups: list[Group], weights: Mapping[str, float] | None = None) -> Graded:
    """Return the rewards of the groups' samples; one whose reward is None is not graded.

    `weights` are those of a reward's parts, by name; without them each weighs 1.
    """
    shape = (len(groups), max((len(group.slots) for group in groups), default=0))
    samples = {
        (row, column): sample
        for row, group in enumerate(groups)
        for column, sample in enumerate(group.samples)
        if sample.reward is not None
    }
    rewards, lengths, mask = np.zeros(shape), np.zeros(shape, np.int64), np.zeros(shape, bool)
    for place, sample in samples.items():
        rewards[place], lengths[place], mask[place] = sample.reward, len(sample.response), True
    further = {**_part_rewards(samples, shape, weights or {}), **_steps(samples, shape)}
    return Graded(*map(torch.from_numpy, (rewards, mask, lengths)), **further)


def _check_steps(groups: list[Group], settings: AdvantageBase) -> None:
    graded = [sample for group in groups for sample in group.samples if sample.reward is not None]
    without = [sample for sample in graded if not sample.step_rewards]
    if not settings.needs_step_rewards or not without:
        return
    truncated = sum(not sample.finished for sample in without)
    raise RewardError(
        f"domains.{without[0].domain}.rewards: objective.advantage {settings.name} compares steps,"
        f" but {len(without)} of {len(graded)} responses have none, {truncated} of which were"
        " truncated; give the reward that scores steps unfinished: score, have it return Steps for"
        " every response, or use another advantage"
    )


def _part_rewards(
    samples: dict[Place, Sample], shape: Place, weights: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """Return part_rewards [groups, G, K] and their weights, where every sample has parts.

    A part of weight 0 is not among them: it adds nothing, and a sample lacks it where it failed.
    """
    names = {name for sample in samples.values() for name in sample.reward_parts or {}}
    used = {name: weights.get(name, 1.0) for name in sorted(names) if weights.get(name, 1.0)}
    if not used or any(sample.reward_parts is None for sample in samples.values()):
        return {}
    part_rewards = np.zeros((*shape, len(used)))
    for place, sample in samples.items():
        assert sample.reward_parts is not None
        part_rewards[place] = [sample.reward_parts[name] for name in used]
    weighed = torch.tensor(list(used.values()), dtype=torch.float64)
    return {"part_rewards": torch.from_numpy(part_rewards), "weights": weighed}


def _steps(samples: dict[Place, Sample], shape: Place) -> dict[str, torch.Tensor]:
    """Return step rewards and ends [groups, G, S], where every sample has steps."""
    steps = {place: sample.step_rewards for place, sample in samples.items()}
    if not steps or any(sample_steps is None for sample_steps in steps.values()):
        return {}
    most = max(len(sample_steps or ()) for sample_steps in steps.values())
    rewards, ends = np.zeros((*shape, most)), np.full((*shape, most), -1)
    for place, sample_steps in steps.items():
        for index, (end, reward) in enumerate(sample_steps or ()):
            rewards[place][index], ends[place][index] = reward, end
    return {"step_rewards": torch.from_numpy(rewards), "step_ends": torch.from_numpy(ends)}


class LengthWeights:
    """The weights by length of one update's responses; their exponent learns from its loss."""

    def __init__(self, samples: list[Sample], exponent: float) -> None:
        self._exponent = torch.tensor(float(exponent), device=device(), requires_grad=True)
        lengths = [float(len(sample.response)) for sample in samples]
        self._lengths = torch.tensor(lengths, device=device())
        groups = [sample.group for sample in samples]
        self._groups = torch.tensor(groups, dtype=torch.int64, device=device())
        self._places = {id(sample): place for place, sample in enumerate(samples)}

    def of(self, batch: MicroBatch) -> torch.Tensor:
        """Return the weights of a micro-batch of the update, [B]."""
        weights = length_weights(self._lengths, self._groups, self._exponent)
        places = [self._places[id(sample)] for sample in batch.samples]
        return weights[torch.tensor(places, dtype=torch.int64, device=weights.device)]

    def gradient(self) -> float:
        """Return the derivative of the update's loss by the exponent. Collective."""
        gradient = self._exponent.grad
        return sum_over_data({"gradient": 0.0 if gradient is None else gradient.item()})["gradient"]


def length_weights(
    lengths: Float[Tensor, " responses"],
    groups: Int[Tensor, " responses"],
    exponent: Float[Tensor, ""],
) -> Float[Tensor, " responses"]:
    """Return f_i = G softmax(h^lambda), h_i = 1 + z_i / 9, of n responses: [n].

    Lambda-GRPO (arXiv 2510.06870). z_i is the standard score of a response's length within its
    group, in population standard deviations, and 0 where all are equally long; the softmax and its
    mean are over the G responses of the group. `lengths` [n] floating point, in tokens; `groups`
    int64 [n], the group of each, from 0; `exponent`, lambda, a scalar with gradient. At 0 every
    weight is 1, above it long responses count for more, below it short ones.

    Example: a group of lengths 2 and 4, standard scores -1 and 1, with lambda 1:
        >>> lengths, groups = torch.tensor([2.0, 4.0]), torch.tensor([0, 0])
        >>> length_weights(lengths, groups, torch.tensor(1.0))  # 2 softmax(8/9, 10/9)
        tensor([0.8893, 1.1107])
    """
    size = int(groups.max()) + 1 if len(groups) else 0

    def of_group(values: Float[Tensor, " responses"]) -> Float[Tensor, " responses"]:
        """Return each response's sum over its group."""
        return values.new_zeros(size).index_add(0, groups, values)[groups]

    count = of_group(lengths.new_ones(lengths.shape))
    # Not std(): groups of a batch differ in size, so that their responses form no matrix.
    centred = lengths - of_group(lengths) / count
    deviation = (of_group(centred.square()) / count).sqrt()
    score = centred / deviation.where(deviation > 0, 1.0)
    # In large groups an outlier's h would fall below 0, which has no real power.
    logits = (1 + score / SPREAD).clamp(min=1e-3) ** exponent
    lowest = logits.new_full((size,), -float("inf"))
    highest = lowest.scatter_reduce(0, groups, logits.detach(), "amax")[groups]
    powers = (logits - highest).exp()
    return count * powers / of_group(powers)


def scale_by_entropy(samples: list[Sample], batches: list[MicroBatch]) -> None:
    """Divide the advantages of this rank's micro-batches of `samples` by relative entropies.

    Only learned tokens count. Collective.
    """
    # Named sums are reduced: every rank has all groups of the step, so that the names agree.
    sums = {str(sample.group): 0.0 for sample in samples}
    counts = dict.fromkeys(sums, 0)
    for sample in samples:
        counts[str(sample.group)] += bool(len(sample.learned))
    measured = []
    for batch in batches:
        if batch.old_entropies is None:  # not on the last pipeline stage
            continue
        entropies = sequence_means(batch.old_entropies, batch.mask)
        measured.append((batch, entropies))
        for sample, entropy in zip(batch.samples, entropies.tolist(), strict=True):
            sums[str(sample.group)] += entropy
    sums = sum_over_data(sums)
    for batch, entropies in measured:
        names = [str(sample.group) for sample in batch.samples]
        of_group = entropies.new_tensor([sums[name] / max(counts[name], 1) for name in names])
        batch.advantages = edge(batch.advantages, entropies, of_group)


def edge(
    advantages: Float[Tensor, "responses tokens"],
    entropies: Float[Tensor, " responses"],
    group_means: Float[Tensor, " responses"],
) -> Float[Tensor, "responses tokens"]:
    """Return A_i / H_i, H_i the response's mean token entropy over its group's mean (EDGE).

    `advantages` [B, T]; `entropies` and `group_means` [B], in nats, of the policy that sampled.
    Source: arXiv 2507.21848.

    Example: entropies of 1 and 3 nats in one group:
        >>> edge(torch.tensor([[3.0], [3.0]]), torch.tensor([1.0, 3.0]), torch.tensor([2.0, 2.0]))
        tensor([[6.],
                [2.]])
    """
    relative = entropies / group_means.clamp(min=1e-12)
    return advantages / relative.clamp(min=LEAST_RELATIVE_ENTROPY).unsqueeze(-1)
