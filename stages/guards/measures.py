"""Metrics that the guards read from one step's samples; pure functions of graded groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev

from parallel.sample import Sample
from stages.guards.similarity import repeats
from stages.objectives.groups import Group
from stages.rewards.grading import solved
from stages.rewards.registry import RewardSettings

SIMILAR = 0.8  # share of common shingles of nearly equal responses

Rewards = Mapping[str, RewardSettings]
Domains = Mapping[str, Rewards]


def group_metrics(groups: Sequence[Group], rewards: Domains) -> dict[str, float]:
    """Return the metrics of all groups sampled for a step.

    A sample without a reward is in no metric of rewards. `rewards` are those of each domain.
    """
    return {
        **rightness(groups, rewards),
        **spread(groups),
        **length_ratio(groups, rewards),
        **repetition(groups),
    }


def rightness(groups: Sequence[Group], rewards: Domains) -> dict[str, float]:
    """Return the shares of groups whose samples all solve their problem, and where none does."""
    verdicts = [
        [is_right(sample, rewards[sample.domain]) for sample in graded(group)] for group in groups
    ]
    count = max(len(groups), 1)
    return {
        "all_right": sum(all(each) for each in verdicts if each) / count,
        "all_wrong": sum(not any(each) for each in verdicts if each) / count,
    }


def spread(groups: Sequence[Group]) -> dict[str, float]:
    """Return the mean population std of rewards, over groups with two graded samples."""
    earned = [[sample.reward or 0.0 for sample in graded(group)] for group in groups]
    deviations = [pstdev(rewards) for rewards in earned if len(rewards) >= 2]
    return {"reward_spread": fmean(deviations)} if deviations else {}


def length_ratio(groups: Sequence[Group], rewards: Domains) -> dict[str, float]:
    """Return the mean length of wrong responses over that of right ones, if there are both."""
    lengths: dict[bool, list[int]] = {True: [], False: []}
    for sample in (sample for group in groups for sample in graded(group)):
        lengths[is_right(sample, rewards[sample.domain])].append(len(sample.response))
    if not (lengths[True] and lengths[False]):
        return {}
    return {"wrong_over_right": fmean(lengths[False]) / fmean(lengths[True])}


def repetition(groups: Sequence[Group]) -> dict[str, float]:
    """Return the shares of samples equal, or nearly equal, to an earlier one of their group.

    They are shares of the samples that have an earlier one.
    """
    found = [repeats([sample.response for sample in each.samples], SIMILAR) for each in groups]
    later = max(sum(len(group.samples) - 1 for group in groups), 1)
    return {
        "identical_responses": sum(identical for identical, _ in found) / later,
        "similar_responses": sum(alike for _, alike in found) / later,
    }


def graded(group: Group) -> list[Sample]:
    """Return the samples of a group that have a reward."""
    return [sample for sample in group.samples if sample.reward is not None]


def is_right(sample: Sample, rewards: Rewards) -> bool:
    """Return true where a graded sample solves its problem, as evaluation counts it."""
    return sample.reward_parts is not None and solved(rewards, sample.reward_parts)
