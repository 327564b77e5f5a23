"""The dispatch of samples to the reward workers, each as soon as it is sampled."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping

from parallel.sample import Sample
from stages.data.tokenizer import Tokenizer
from stages.objectives.groups import Group
from stages.rewards.pool import RewardPool
from stages.rewards.reward import Response
from stages.settings import DomainSettings, StageJob


class RewardDispatcher:
    """The reward workers of a stage's domains; main rank only.

    `wake` is called from another thread whenever a grade arrives.
    """

    def __init__(
        self,
        job: StageJob,
        domains: Mapping[str, DomainSettings],
        tokenizer: Tokenizer,
        wake: Callable[[], None],
    ) -> None:
        rewards = {domain: each.rewards for domain, each in domains.items()}
        self._decode = tokenizer.decode
        self._pool = RewardPool(rewards, job.settings.rewards, job.directory, wake)

    @property
    def pending(self) -> bool:
        """True while grades are in flight, so that `wake` will be called again."""
        return self._pool.owed > 0

    def expect(self, groups: Iterable[Group]) -> None:
        """Have groups graded that are about to be requested."""
        for group in groups:
            group.grades = [None] * len(group.drawn)

    def dispatch(self, group: Group, index: int, sample: Sample) -> None:
        """Have one sample graded if its group is to be graded; do not wait for the grade."""
        if group.grades is not None:
            text = self._decode(sample.response)
            response = Response(text, len(sample.response), sample.finished)
            [group.grades[index]] = self._pool.submit(group.problem, [response])

    def graded(self, group: Group) -> bool:
        """Return whether a group is whole and graded; write the grades to its samples once it is.

        Raises RewardError when no reward worker is left.
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
                steps = grade.steps
                sample.step_rewards = [(self._token_at(sample, end), part) for end, part in steps]
            if grade.failure is not None:
                group.failures.append(grade.failure)
            group.watch_failures += grade.watch_failures
        group.graded = True
        return True

    def check_failures(self, failures: list[str], samples: int) -> None:
        """Raise RewardError when too many of `samples` samples have no reward."""
        self._pool.check_failures(failures, samples)

    def close(self) -> None:
        """Stop the workers; samples without a grade keep none."""
        self._pool.close()

    def _token_at(self, sample: Sample, characters: int) -> int:
        """Return the index of the response token that the first `characters` characters end with.

        Decoding a prefix is the only mapping that holds for every tokenizer: one character may
        take several tokens.
        """

        def length(place: int) -> int:
            return len(self._decode(sample.response[: place + 1]))

        return bisect_left(range(len(sample.response) - 1), characters, key=length)
