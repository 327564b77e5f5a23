"""A prompt group: a prompt and all of its samples, as they come in."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future
from dataclasses import dataclass, field

from parallel.sample import Sample
from stages.data.problem import Problem
from stages.rewards.grading import Grade


@dataclass(eq=False)
class Group:
    """All samples of one prompt; sample i is sampled with seed + i.

    `begun` is the version of the weights that the engines had when it was requested.
    `ended` counts the groups that were complete before this one; None while samples are missing.
    `grades` are the pending grades of its samples, where they are wanted. Once it is `graded`, its
    samples have their rewards, `failures` says why some have none, and `watch_failures` why some
    have no value of a reward of weight 0.
    """

    problem: Problem
    seed: int
    drawn: list[Sample | None]
    begun: int = 0
    ended: int | None = None
    grades: list[Future[Grade] | None] | None = None
    graded: bool = False
    failures: list[str] = field(default_factory=list)
    watch_failures: list[str] = field(default_factory=list)

    @property
    def samples(self) -> list[Sample]:
        """The samples of a complete group."""
        assert self.ended is not None
        return [sample for sample in self.drawn if sample is not None]

    @property
    def weight_version(self) -> int:
        """The version of the oldest weights that sampled any of its tokens."""
        return min(sample.weight_version for sample in self.samples)

    @property
    def zero_variance(self) -> bool:
        """True where all rewards are equal, not counting samples whose reward failed."""
        rewards = {sample.reward for sample in self.samples if sample.reward is not None}
        return len(rewards) <= 1


def groups_of(problems: list[Problem], size: int, seed: int) -> list[Group]:
    """Return a group of `size` for each problem; no two samples share a seed."""
    return [
        Group(problem, seed + index * size, [None] * size) for index, problem in enumerate(problems)
    ]


def seed_of(*parts: object) -> int:
    """Return a seed below 2^62 that no other purpose shares."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8]) >> 2
