"""The groups that a step trains on, collected from the prompts in flight, and their metrics.

Main rank only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

from parallel.engine.wire import keeps_part, kept_limits
from parallel.sample import Sample
from stages.objectives.groups import Group
from stages.sampling.prompt_buffer import PromptBuffer
from stages.settings import RolloutSettings, SamplingSettings


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

    def metrics(
        self, step: int, sampling: SamplingSettings, vocabulary: int, most: int
    ) -> dict[str, float]:
        """Return the metrics that every stage logs; `most` is the maximum policy lag.

        A lag is in training steps, from a sample's oldest weights to the version `step`.
        """
        # Replaced groups count: without them the reward would tend to one half.
        sampled = [sample for group in self.sampled for sample in group.samples]
        trained = [sample for group in self.groups for sample in group.samples]
        lags = Counter(step - sample.weight_version for sample in trained)
        return {
            **reward_metrics(sampled),
            "unfinished": sum(not sample.finished for sample in sampled) / len(sampled),
            "response_tokens": sum(len(sample.response) for sample in sampled) / len(sampled),
            **saturated(trained, sampling, vocabulary),
            "staleness_mean": sum(lag * n for lag, n in lags.items()) / len(trained),
            "staleness_max": float(max(lags)),
            **{f"staleness_{lag}": lags[lag] / len(trained) for lag in range(most + 1)},
            "dropped_stale": float(self.too_old),
            "reward_failures": float(self.failures),
            "watch_failures": float(self.watch_failures),
        }


def reward_metrics(samples: list[Sample]) -> dict[str, float]:
    """Return the mean reward, and the mean of each of its parts, over the graded samples."""
    graded = [sample for sample in samples if sample.reward is not None]
    named: dict[str, list[float]] = {}
    for sample in graded:
        for name, value in (sample.reward_parts or {}).items():
            named.setdefault(name, []).append(value)
    return {
        "reward": sum(sample.reward or 0.0 for sample in graded) / max(len(graded), 1),
        **{f"reward/{name}": sum(values) / len(values) for name, values in sorted(named.items())},
    }


def saturated(
    samples: list[Sample], sampling: SamplingSettings, vocabulary: int
) -> dict[str, float]:
    """Return the share of tokens whose kept set is as large as the engine may return.

    Such a set may have been larger. Nothing where sampling keeps the whole vocabulary.
    """
    if not keeps_part(sampling.top_k, sampling.top_p):
        return {}
    _, most = kept_limits(sampling.top_k, sampling.top_p, vocabulary)
    sizes = [len(kept) for sample in samples for kept in sample.kept or []]
    full = sum(size >= most for size in sizes) if most < vocabulary else 0
    return {"kept_saturated": full / max(len(sizes), 1)}


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
        groups = [group for taken in self._taken.values() for group in taken.groups]
        replaced = [group for taken in self._taken.values() for group in taken.replaced]
        failures = len(self._failures)
        batch = Batch(groups, replaced, self._too_old, failures, self._watch_failures)
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
        if taken.useless and taken.rounds and not self._missing(taken):
            taken.rounds -= 1
            taken.replaced += taken.useless
            taken.useless = []

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
