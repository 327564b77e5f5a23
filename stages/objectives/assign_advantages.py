"""Advantages of a batch's samples, from the rewards of their groups."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from parallel.sample import Sample
from stages.objectives.advantages import compute_advantages
from stages.objectives.graded import AdvantageBase, Graded
from stages.objectives.groups import Group
from stages.rewards.reward import RewardError


def assign_advantages(
    groups: list[Group],
    settings: AdvantageBase,
    weights: Mapping[str, float] | None = None,
    first: int = 0,
) -> list[list[Sample]]:
    """Set the advantage of every graded sample, and return them as `graded_samples` does.

    `weights` are those of a reward's parts, by name; without them each weighs 1.

    Raises:
        RewardError: the advantage compares steps, and a graded sample has none.
    """
    _check_steps(groups, settings)
    found = compute_advantages(graded(groups, weights), settings).float().numpy()
    for number, group in enumerate(groups):
        for sample, values in zip(group.samples, found[number], strict=False):
            if found.shape[-1] > 1:
                sample.advantages = values[: len(sample.response)]
                values = sample.advantages
            sample.advantage = float(values.mean())
    return graded_samples(groups, first)


def has_zero_advantages(
    group: Group,
    settings: AdvantageBase,
    weights: Mapping[str, float] | None = None,
    mask_truncated: bool = False,
) -> bool:
    """Return true where no learned token of a graded group has an advantage within the group.

    With a critic, whose advantages are of no group: where all rewards are equal. With
    `mask_truncated`, truncated responses are not learned.
    """
    if mask_truncated and not any(sample.finished for sample in group.samples):
        return True
    if settings.baseline == "critic":
        return group.zero_variance
    _check_steps([group], settings)
    found = compute_advantages(graded([group], weights), settings)[0]
    learned = [sample.finished or not mask_truncated for sample in group.samples]
    return not found[: len(learned)][learned].any()


def graded_samples(groups: list[Group], first: int = 0) -> list[list[Sample]]:
    """Return the graded samples of each group; number the groups of all samples from `first`."""
    for number, group in enumerate(groups):
        for sample in group.samples:
            sample.group = first + number
    return [[each for each in group.samples if each.reward is not None] for group in groups]


def graded(groups: list[Group], weights: Mapping[str, float] | None = None) -> Graded:
    """Return the rewards of the groups' samples; one whose reward is None is not graded.

    `weights` are those of a reward's parts, by name; without them each weighs 1.
    """
    shape = (len(groups), max((len(group.drawn) for group in groups), default=0))
    samples = {
        (row, column): sample
        for row, group in enumerate(groups)
        for column, sample in enumerate(group.samples)
        if sample.reward is not None
    }
    rewards, lengths, mask = np.zeros(shape), np.zeros(shape, np.int64), np.zeros(shape, bool)
    for place, sample in samples.items():
        rewards[place], lengths[place], mask[place] = sample.reward, len(sample.response), True
    return Graded(
        rewards=torch.from_numpy(rewards),
        graded=torch.from_numpy(mask),
        lengths=torch.from_numpy(lengths),
        **_parts(samples, shape, weights or {}),
        **_steps(samples, shape),
    )


def _check_steps(groups: list[Group], settings: AdvantageBase) -> None:
    if not settings.needs_step_rewards:
        return
    graded = [each for group in groups for each in group.samples if each.reward is not None]
    without = [sample for sample in graded if not sample.step_rewards]
    if not without:
        return
    truncated = sum(not sample.finished for sample in without)
    raise RewardError(
        f"domains.{without[0].domain}.rewards: objective.advantage {settings.name} compares steps,"
        f" but {len(without)} of {len(graded)} responses have none, {truncated} of which were"
        " truncated; give the reward that scores steps unfinished: score, have it return Steps for"
        " every response, or use another advantage"
    )


def _parts(
    samples: dict[tuple[int, int], Sample], shape: tuple[int, int], weights: Mapping[str, float]
) -> dict[str, torch.Tensor]:
    """Return parts [groups, G, K] and their weights, where every sample has parts.

    A part of weight 0 is not among them: it adds nothing, and a sample lacks it where it failed.
    """
    found = {name for sample in samples.values() for name in sample.reward_parts or {}}
    names = sorted(name for name in found if weights.get(name, 1.0))
    if not names or any(sample.reward_parts is None for sample in samples.values()):
        return {}
    parts = np.zeros((*shape, len(names)))
    for place, sample in samples.items():
        assert sample.reward_parts is not None
        parts[place] = [sample.reward_parts[name] for name in names]
    weighed = [weights.get(name, 1.0) for name in names]
    return {
        "parts": torch.from_numpy(parts),
        "weights": torch.tensor(weighed, dtype=torch.float64),
    }


def _steps(
    samples: dict[tuple[int, int], Sample], shape: tuple[int, int]
) -> dict[str, torch.Tensor]:
    """Return step rewards and ends [groups, G, S], where every sample has steps."""
    steps = {place: sample.step_rewards for place, sample in samples.items()}
    if not steps or any(each is None for each in steps.values()):
        return {}
    most = max(len(each or ()) for each in steps.values())
    rewards, ends = np.zeros((*shape, most)), np.full((*shape, most), -1)
    for place, each in steps.items():
        for index, (end, reward) in enumerate(each or ()):
            rewards[place][index], ends[place][index] = reward, end
    return {"step_rewards": torch.from_numpy(rewards), "step_ends": torch.from_numpy(ends)}
