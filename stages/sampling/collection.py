"""The groups that a step trains on, collected from the prompts in flight; main rank only."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

from stages.objectives.groups import Group
from stages.sampling.prompt_buffer import PromptBuffer
from stages.settings import RolloutSettings


@dataclass
class Batch:
    """The groups that a step trains on, in the order of their prompts, and what else it sampled.

    Groups are `replaced` that have nothing to learn from; `too_old` counts dropped samples. Of all
    of these, `failures` samples have no reward; a reward of weight 0 failed `watch_failures` times.
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


@dataclass
class _Taken:
    """One domain's part of an incomplete batch; `rounds` of replacement are left."""

    rounds: int
    useful: list[Group] = field(default_factory=list)
    useless: list[Group] = field(default_factory=list)
    replaced: list[Group] = field(default_factory=list)

    @property
    def groups(self) -> list[Group]:
        return sorted([*self.useful, *self.useless], key=lambda group: group.problem.index)

    def replace_useless(self) -> None:
        """Make room for other groups in place of the useless ones, if a round is left."""
        if self.useless and self.rounds:
            self.rounds -= 1
            self.replaced += self.useless
            self.useless = []


class Collection:
    """One step's groups, taken from the prompt buffer as they become whole.

    Whether a prompt is trained on does not depend on how long its responses take: the step waits
    for groups that would be too old before a later step has room for them.

    `version` is that of the weights that the step starts with; dynamic sampling replaces groups
    that `is_useless` selects.
    """

    def __init__(
        self,
        buffer: PromptBuffer,
        settings: RolloutSettings,
        version: int,
        is_useless: Callable[[Group], bool] = attrgetter("zero_variance"),
    ) -> None:
        self._buffer = buffer
        self._is_useless = is_useless
        self._settings = settings
        self._version = version
        self._too_old = 0
        self._failures: list[str] = []
        self._watch_failures = 0
        rounds = settings.dynamic_sampling
        self._taken = {domain: _Taken(rounds) for domain in buffer.domains}

    def batch(self) -> Batch | None:
        """Return the whole batch, or None while a part is in flight.

        Raises RewardError when too many of its samples have no reward.
        """
        for domain, taken in self._taken.items():
            while self._missing(taken):
                latest = self._latest(domain, self._missing(taken))
                if (group := self._buffer.take(domain, latest)) is None:
                    break
                self._add(taken, group)
        missing = {domain: self._missing(taken) for domain, taken in self._taken.items()}
        if any(missing.values()):
            self._buffer.request(missing)
            return None
        parts = self._taken.values()
        batch = Batch(
            groups=[group for taken in parts for group in taken.groups],
            replaced=[group for taken in parts for group in taken.replaced],
            too_old=self._too_old,
            failures=len(self._failures),
            watch_failures=self._watch_failures,
        )
        # In the order of the prompts: that in which groups become whole differs between runs.
        self._buffer.update_curricula(sorted(batch.sampled, key=lambda group: group.problem.index))
        return batch

    def _latest(self, domain: str, room: int) -> int:
        """Return the newest version that the next group may have been requested under.

        With `room` for that many more groups in this step, and whole steps of room after it, every
        group in flight must be trained on before it is too old.
        """
        requested = self._buffer.versions_in_flight(domain)
        oldest = self._version - self._settings.max_staleness
        for later in range(self._settings.max_staleness):
            due = sum(version <= oldest + later for version in requested)
            if due >= room + later * self._buffer.sampling.prompts_per_step:
                return oldest + later
        return self._version

    def _add(self, taken: _Taken, group: Group) -> None:
        self._failures += group.failures
        self._watch_failures += len(group.watch_failures)
        self._buffer.check_failures(self._failures)
        if self._version - group.weight_version > self._settings.max_staleness:
            self._too_old += len(group.samples)
            return
        (taken.useless if self._is_useless(group) else taken.useful).append(group)
        if not self._missing(taken):
            taken.replace_useless()

    def _missing(self, taken: _Taken) -> int:
        wanted = self._buffer.sampling.prompts_per_step
        return wanted - len(taken.useful) - len(taken.useless)


class Prefetcher:
    """The prompts of the present step, and of `settings.prefetch` steps more, kept in flight."""

    def __init__(
        self,
        buffer: PromptBuffer,
        settings: RolloutSettings,
        steps: int,
        is_useless: Callable[[Group], bool] = attrgetter("zero_variance"),
    ) -> None:
        self._buffer = buffer
        self._settings = settings
        self._steps = steps
        self._is_useless = is_useless
        self._collection: Collection | None = None
        self._all_prefetched = False  # the present step's prompts
        self._late = False  # whether the step waited though all were

    def start(self, step: int) -> None:
        """Request the prompts that the step lacks, and start to collect it."""
        # A step that drains is sampled from the weights of the step before.
        behind = self._settings.drains and step > 1
        self._all_prefetched = not self._fill(1, behind)
        self._open(step)

    def restart(self, step: int, groups: list[Group], attempt: int) -> None:
        """Request other samples of the prompts of `groups`, and start to collect the step."""
        self._buffer.redraw(groups, attempt)
        self._open(step)

    def collect(self) -> Batch | None:
        """Return the step's batch, or None while a part of it is in flight."""
        assert self._collection is not None
        batch = self._collection.batch()
        if batch is None:
            self._late = self._all_prefetched
        return batch

    def prefetch(self, step: int) -> None:
        """Request prompts of the steps after this one.

        No more than one step's while the engines keep up with the trainer: what is sampled early
        only waits and grows old.
        """
        ahead = self._settings.prefetch if self._late else min(1, self._settings.prefetch)
        self._fill(min(ahead, self._steps - step), behind=True)

    def _open(self, step: int) -> None:
        self._late = False
        self._collection = Collection(self._buffer, self._settings, step, self._is_useless)

    def _fill(self, steps: int, behind: bool) -> int:
        """Fill up to `steps` steps of prompts in flight; return the number of new prompts.

        Never more than are trained on before they are too old: `max_staleness` steps, and one more
        unless they are `behind`, a version older than the step that trains on the first of them.
        """
        per_step, most = self._buffer.sampling.prompts_per_step, self._settings.max_staleness
        wanted = math.ceil(steps * per_step * self._settings.oversampling)
        count = min(wanted, (most + (not behind)) * per_step)
        return self._buffer.request(dict.fromkeys(self._buffer.domains, count))
