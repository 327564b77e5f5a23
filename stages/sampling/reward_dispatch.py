"""Rewards of samples as soon as they are drawn, while others still are; main rank only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from parallel.sample import Sample
from stages.objectives.groups import Group
from stages.rewards.pool import RewardPool
from stages.rewards.reward import Response
from stages.sampling.engines import Rollouts
from stages.settings import DomainSettings, StageJob


class Scoring:
    """Has the rewards of a stage's domains grade what its engines draw."""

    def __init__(
        self, job: StageJob, domains: Mapping[str, DomainSettings], rollouts: Rollouts
    ) -> None:
        rewards = {domain: each.rewards for domain, each in domains.items()}
        self._rollouts = rollouts
        self._pool = RewardPool(rewards, job.settings.rewards, job.directory, rollouts.wake)
        rollouts.awaited = lambda: self._pool.owed > 0
        rollouts.on_sample = self._begin

    def expect(self, groups: Iterable[Group]) -> None:
        """Have the samples of these groups graded, which are about to be asked for."""
        for group in groups:
            group.grades = [None] * len(group.drawn)

    def done(self, group: Group) -> bool:
        """Whether every sample of a group is graded or has failed; they then say which.

        Raises RewardError where nothing can be graded any more.
        """
        if group.ended is None or group.grades is None or group.graded:
            return group.graded
        futures = [future for future in group.grades if future is not None]
        if not all(future.done() for future in futures):
            return False
        for sample, future in zip(group.samples, futures, strict=True):
            grade = future.result()
            sample.reward, sample.reward_parts = grade.reward, grade.parts
            if grade.steps:
                sample.step_rewards = self._by_token(sample, grade.steps)
            if grade.failure is not None:
                group.failures.append(grade.failure)
            group.watch_failures += grade.watch_failures
        group.graded = True
        return True

    def hold_to_limit(self, failures: list[str], samples: int) -> None:
        """Raise RewardError where too many of so many samples have no reward."""
        self._pool.hold_to_limit(failures, samples)

    def close(self) -> None:
        """Leave what is not graded."""
        self._pool.close()

    def _begin(self, group: Group, index: int, sample: Sample) -> None:
        if group.grades is not None:
            text = self._rollouts.text(sample)
            response = Response(text, len(sample.response), sample.finished)
            [group.grades[index]] = self._pool.submit(group.problem, [response])

    def _by_token(
        self, sample: Sample, steps: Iterable[tuple[int, float]]
    ) -> list[tuple[int, float]]:
        return [(self._rollouts.token_at(sample, end), reward) for end, reward in steps]


def reward_metrics(samples: list[Sample]) -> dict[str, float]:
    """The mean reward, and that of each of its parts, of those that were graded."""
    graded = [sample for sample in samples if sample.reward is not None]
    named: dict[str, list[float]] = {}
    for sample in graded:
        for name, value in (sample.reward_parts or {}).items():
            named.setdefault(name, []).append(value)
    return {
        "reward": sum(sample.reward or 0.0 for sample in graded) / max(len(graded), 1),
        **{f"reward/{name}": sum(values) / len(values) for name, values in sorted(named.items())},
    }
