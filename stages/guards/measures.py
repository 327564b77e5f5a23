"""Metrics that the guards read from one step's samples; pure functions of graded groups.

Two responses are similar where they share shingles, runs of a few tokens (Jaccard). A long response
is represented by the smallest hashes of its shingles (bottom-k sketches, Broder 1997), so that a
pair costs the same at any length; a short one by all of them, exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

import numpy as np

from parallel.sample import Sample
from stages.objectives.groups import Group
from stages.rewards.reward import RewardBase, solved

SHINGLE = 3  # tokens
SKETCH = 256  # hashes; the estimate's standard error is then at most 0.03
SIMILAR = 0.8  # share of common shingles of nearly equal responses
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # splitmix64's

Rewards = Mapping[str, RewardBase]


def group_metrics(groups: Sequence[Group], rewards: Mapping[str, Rewards]) -> dict[str, float]:
    """Return the metrics of all groups sampled for a step, given the rewards of each domain.

    A sample without a reward is in no metric of rewards; a metric of no sample is left out.
    `reward_spread` is the mean population std of a group's rewards, `wrong_over_right` the ratio of
    mean lengths. `identical_responses` and `similar_responses` are the shares of samples equal, or
    nearly equal, to an earlier one of their group, among those that have an earlier one.
    """
    rated = [
        [(sample, is_right(sample, rewards[sample.domain])) for sample in graded(group)]
        for group in groups
    ]
    verdicts = [[right for _, right in group] for group in rated if group]
    metrics = {
        "all_right": sum(map(all, verdicts)) / max(len(groups), 1),
        "all_wrong": sum(not any(rights) for rights in verdicts) / max(len(groups), 1),
    }
    earned = [[sample.reward or 0.0 for sample, _ in group] for group in rated if len(group) >= 2]
    if earned:
        metrics["reward_spread"] = fmean(map(pstdev, earned))
    lengths: dict[bool, list[int]] = {True: [], False: []}
    for sample, right in (pair for group in rated for pair in group):
        lengths[right].append(len(sample.response))
    if lengths[True] and lengths[False]:
        metrics["wrong_over_right"] = fmean(lengths[False]) / fmean(lengths[True])
    counts = [repeats([sample.response for sample in group.samples], SIMILAR) for group in groups]
    later = max(sum(len(group.samples) - 1 for group in groups), 1)
    metrics["identical_responses"] = sum(identical for identical, _ in counts) / later
    metrics["similar_responses"] = sum(alike for _, alike in counts) / later
    return metrics


def graded(group: Group) -> list[Sample]:
    """Return the samples of a group that have a reward."""
    return [sample for sample in group.samples if sample.reward is not None]


def is_right(sample: Sample, rewards: Rewards) -> bool:
    """Return true where a graded sample solves its problem, as evaluation counts it."""
    return sample.reward_parts is not None and solved(rewards, sample.reward_parts)


@dataclass(frozen=True)
class Sketch:
    """The `SKETCH` smallest hashes of a response's shingles; `whole` where there are no others."""

    hashes: frozenset[int]
    whole: bool


def sketch(tokens: np.ndarray) -> Sketch:
    """Return the sketch of tokens, int [length]; fewer than `SHINGLE` tokens are one shingle.

    All shingles are hashed together, one token of each at a time: hash = mix(hash + token + 1).
    """
    size = min(SHINGLE, len(tokens))
    shingles = len(tokens) - size + 1
    hashes = np.zeros(shingles if size else 0, np.uint64)
    for offset in range(size):
        column = tokens[offset : offset + shingles].astype(np.uint64)
        hashes = _mix(hashes + column + np.uint64(1))  # mix(0) is 0: token 0 would not count
    smallest = np.unique(hashes)
    return Sketch(frozenset(smallest[:SKETCH].tolist()), len(smallest) <= SKETCH)


def jaccard(one: Sketch, other: Sketch) -> float:
    """Return the share of the shingles of either that both have, in [0, 1]; 1 if both are empty."""
    either, both = one.hashes | other.hashes, one.hashes & other.hashes
    if not either:
        return 1.0
    if one.whole and other.whole:
        return len(both) / len(either)
    # Hashes beyond the smallest of the union were cut from one of the sketches, or not seen.
    smallest = sorted(either)[:SKETCH]
    return sum(shingle in both for shingle in smallest) / len(smallest)


def repeats(responses: list[np.ndarray], similar: float) -> tuple[int, int]:
    """Count responses equal to an earlier one of the group, and those similar to an earlier one.

    Similar ones share at least `similar` of their shingles; equal ones are among them.
    """
    seen: set[bytes] = set()
    sketches: list[Sketch] = []
    identical = alike = 0
    for response in responses:
        text = response.tobytes()
        if text in seen:
            # An equal response needs no sketch: later ones are compared with the first of them.
            identical += 1
            continue
        seen.add(text)
        response_sketch = sketch(response)
        alike += any(_alike(response_sketch, earlier, similar) for earlier in sketches)
        sketches.append(response_sketch)
    return identical, identical + alike


def _alike(one: Sketch, other: Sketch, similar: float) -> bool:
    """Return true where two unequal sketches are similar; most need no union."""
    most = max(len(one.hashes), len(other.hashes))
    return len(one.hashes & other.hashes) >= similar * most and jaccard(one, other) >= similar


def _mix(values: np.ndarray) -> np.ndarray:
    """Mix the bits of uint64 values as splitmix64 does; arithmetic is modulo 2^64."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))
