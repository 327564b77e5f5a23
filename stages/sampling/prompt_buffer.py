"""The prompts of a stage, from the request of their samples to the batch that a step trains on.

The buffer has prompts in flight, a collection takes one step's groups from it as they become whole,
and the prefetcher decides how many steps are requested ahead. Main rank only.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from stages.data.problem import Problem, seed_of
from stages.data.prompts import Frontier, PromptStream
from stages.data.settings import FrontierSettings
from stages.domains import DomainSettings, RolloutSettings, SamplingSettings
from stages.objectives.groups import Batch, Group, groups_of, is_right, rewarded
from stages.sampling.engines import StageEngines
from stages.settings import StageJob

BY_PROMPT = attrgetter("problem.index")


class PromptBuffer:
    """A stage's prompts, from their streams to the step that trains on them.

    A prompt leaves its stream once. It is trained on, or dropped and counted, or saved as in
    flight and requested again when the stage resumes.

    Example: prompts 0 to 3 of the domain math, two of them to be in flight:
        request({"math": 2})  -> 2      in flight: 0 1, sent to the engines
        take("math", 1)       -> None   neither is whole and graded
        take("math", 1)       -> 1      in flight: 0; prompt 1 was whole first
        request({"math": 2})  -> 1      in flight: 0 2
        state()               -> {"cursors": {"math": 3}, "begun": {"math": [0, 2]}, ...}
    """

    def __init__(
        self,
        job: StageJob,
        domains: Mapping[str, DomainSettings],
        sampling: SamplingSettings,
        engines: StageEngines,
    ) -> None:
        self.domains, self.sampling = domains, sampling
        self._job, self._engines = job, engines
        self._streams = {domain: self._stream(domain, cursor=0) for domain in domains}
        self._frontiers = {
            domain: self._frontier(domain, settings.curriculum)
            for domain, settings in domains.items()
            if isinstance(settings.curriculum, FrontierSettings)
        }
        self._saved: dict[str, deque[int]] = {domain: deque() for domain in domains}
        self._in_flight: dict[str, list[Group]] = {domain: [] for domain in domains}
        self._reported_too_long = 0  # of what the streams counted

    def request(self, counts: Mapping[str, int]) -> int:
        """Request prompts until `counts` of each domain are in flight; return how many are new."""
        groups = []
        for domain, count in counts.items():
            new = count - len(self._in_flight[domain])
            groups += [self._group(self._next(domain)) for _ in range(new)]
        self._request(groups)
        return len(groups)

    def redraw(self, groups: list[Group], attempt: int) -> None:
        """Request other samples of the prompts of `groups`."""
        self._request([self._group(group.problem, attempt) for group in groups])

    def probes(self, count: int, purpose: str, longest: int) -> list[Group]:
        """Request a short continuation of half of each of the next prompts, which stay in place.

        In the middle of a text a model chooses among many words; of the begin of an answer it may
        be certain.
        """
        domain = next(iter(self.domains))
        problems = self._stream(domain, self._streams[domain].cursor).take(count)
        problems = [
            replace(problem, prompt=problem.prompt[: (len(problem.prompt) + 1) // 2])
            for problem in problems
        ]
        seed = seed_of(self._job.settings.seed, self._job.seeded_as, domain, purpose)
        groups = groups_of(problems, 1, seed)
        limit = min(longest, self.sampling.max_response_tokens)
        short = self.sampling.model_copy(update={"max_response_tokens": limit})
        self._engines.request(groups, short, at_once=True)
        return groups

    def versions_in_flight(self, domain: str) -> list[int]:
        """Return the weight version under which each group in flight was requested."""
        return [group.dispatch_version for group in self._in_flight[domain]]

    def take(self, domain: str, latest: int) -> Group | None:
        """Take the first whole group of a domain, requested under version `latest` or older.

        Return None until it is graded: groups are taken in the order in which they became whole,
        in whatever order grades arrive.
        """
        groups = [group for group in self._in_flight[domain] if group.dispatch_version <= latest]
        whole = [group for group in groups if group.ended is not None]
        if not whole:
            return None
        group = min(whole, key=lambda candidate: candidate.ended or 0)
        if not self._engines.rewards.graded(group):
            return None
        self._in_flight[domain].remove(group)
        return group

    def check_failures(self, failures: list[str]) -> None:
        """Raise RewardError when a step has too many samples without a reward."""
        per_domain = self.sampling.prompts_per_step * self.sampling.group_size
        self._engines.rewards.check_failures(failures, per_domain * len(self.domains))

    def update_curricula(self, groups: list[Group]) -> None:
        """Update the curricula with what a step's groups earned."""
        for group in groups:
            domain = group.problem.domain
            if domain in self._frontiers:
                rewards = self.domains[domain].rewards
                right = [is_right(sample, rewards) for sample in rewarded(group)]
                self._frontiers[domain].update(group.problem, sum(right), len(right) - sum(right))

    def metrics(self) -> dict[str, float]:
        """Return the prompts skipped as too long, or by curricula if any, since the last call."""
        too_long = self._unreported_too_long()
        self._reported_too_long += too_long
        passed = [frontier.passed_over() for frontier in self._frontiers.values()]
        counts = {"passed_over": float(sum(passed))} if passed else {}
        return {"too_long": float(too_long), **counts}

    def state(self) -> dict[str, Any]:
        """Return, as JSON, every domain's cursor, its prompts in flight, counts and curricula."""
        curricula = {domain: frontier.state() for domain, frontier in self._frontiers.items()}
        return {
            "cursors": {domain: stream.cursor for domain, stream in self._streams.items()},
            "begun": {
                domain: [*self._saved[domain], *(group.problem.index for group in groups)]
                for domain, groups in self._in_flight.items()
            },
            "too_long": self._unreported_too_long(),
            **({"curricula": curricula} if curricula else {}),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; what was in flight is sampled from the present weights."""
        for domain in self.domains:
            self._streams[domain] = self._stream(domain, state["cursors"][domain])
            self._saved[domain] = deque(sorted(state["begun"][domain]))
        # Older versions did not save it; only the metric needs it.
        self._reported_too_long = -state.get("too_long", 0)
        for domain, frontier in self._frontiers.items():
            frontier.restore(state["curricula"][domain])

    def _unreported_too_long(self) -> int:
        counted = sum(stream.too_long for stream in self._streams.values())
        return counted - self._reported_too_long

    def _request(self, groups: list[Group]) -> None:
        for group in groups:
            group.dispatch_version = self._engines.version or 0
            self._in_flight[group.problem.domain].append(group)
        if groups:
            # First: within the request, what the log has is already dispatched to the rewards.
            self._engines.rewards.expect(groups)
            self._engines.request(groups, self.sampling)

    def _group(self, problem: Problem, attempt: int = 0) -> Group:
        purpose = f"prompt {problem.index}, attempt {attempt}"
        seed = seed_of(self._job.settings.seed, self._job.seeded_as, problem.domain, purpose)
        [group] = groups_of([problem], self.sampling.group_size, seed)
        return group

    def _next(self, domain: str) -> Problem:
        if self._saved[domain]:
            return self._stream(domain, self._saved[domain].popleft()).take(1)[0]
        if domain in self._frontiers:
            return self._frontiers[domain].take(self._streams[domain])
        return self._streams[domain].take(1)[0]

    def _frontier(self, domain: str, settings: FrontierSettings) -> Frontier:
        encode = self._engines.tokenizer.encode
        seed = seed_of(self._job.settings.seed, self._job.seeded_as, domain, "curriculum")
        return Frontier(settings, domain, lambda prompt: len(encode(prompt)), seed)

    def _stream(self, domain: str, cursor: int) -> PromptStream:
        settings = self._job.settings
        return PromptStream(
            self.domains[domain].prompts,
            self._engines.tokenizer,
            domain,
            settings.seed,
            self._job.seeded_as,
            cursor=cursor,
            longest=settings.longest_prompt(self.sampling),
        )


@dataclass
class _Taken:
    """One domain's part of an incomplete batch; `rounds` of replacement are left."""

    rounds: int
    informative: list[Group] = field(default_factory=list)
    uninformative: list[Group] = field(default_factory=list)
    replaced: list[Group] = field(default_factory=list)


class Collection:
    """One step's groups, taken from the prompt buffer as they become whole.

    Whether a prompt is trained on does not depend on how long its responses take: the step waits
    for groups that would be too old before a later step has room for them (`newest_version`).

    Waits for: `prompts_per_step` whole, graded groups of each domain.
    Unblocked by: nothing; `batch` returns None until then, and `StageEngines.wait` calls it again
    whenever a sample or a grade arrives.

    `version` is that of the weights that the step starts with; dynamic sampling replaces groups
    that `is_uninformative` selects.
    """

    def __init__(
        self,
        buffer: PromptBuffer,
        settings: RolloutSettings,
        version: int,
        is_uninformative: Callable[[Group], bool] = attrgetter("zero_variance"),
    ) -> None:
        self._buffer = buffer
        self._is_uninformative = is_uninformative
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
        groups = [
            group
            for taken in self._taken.values()
            for group in sorted(taken.informative + taken.uninformative, key=BY_PROMPT)
        ]
        replaced = [group for taken in self._taken.values() for group in taken.replaced]
        failures = len(self._failures)
        batch = Batch(groups, replaced, self._too_old, failures, self._watch_failures)
        # In the order of the prompts: that in which groups become whole differs between runs.
        self._buffer.update_curricula(sorted(batch.sampled, key=BY_PROMPT))
        return batch

    def _latest(self, domain: str, room: int) -> int:
        requested = self._buffer.versions_in_flight(domain)
        per_step = self._buffer.sampling.prompts_per_step
        return newest_version(
            requested, self._version, self._settings.staleness_bound, room, per_step
        )

    def _add(self, taken: _Taken, group: Group) -> None:
        self._failures += group.failures
        self._watch_failures += len(group.watch_failures)
        self._buffer.check_failures(self._failures)
        if self._version - group.weight_version > self._settings.staleness_bound:
            self._too_old += len(group.samples)
            return
        (taken.uninformative if self._is_uninformative(group) else taken.informative).append(group)
        if taken.uninformative and taken.rounds and not self._missing(taken):
            taken.rounds -= 1
            taken.replaced += taken.uninformative
            taken.uninformative = []

    def _missing(self, taken: _Taken) -> int:
        per_step = self._buffer.sampling.prompts_per_step
        return per_step - len(taken.informative) - len(taken.uninformative)


def newest_version(
    requested: Sequence[int], version: int, bound: int, room: int, per_step: int
) -> int:
    """Return the newest version that the next group of a step may have been requested under.

    Every group in flight, by the version it was `requested` under, must be trained on before it is
    more than `bound` versions old. This step, of `version`, has room for `room` more groups, each
    later one for `per_step`: once the groups due by a step fill all room until then, only they may
    be taken. Otherwise any group may.

    Example: step 3, two groups a step, and no group may be more than 2 versions old:

    >>> newest_version([1, 2, 2], version=3, bound=2, room=2, per_step=2)  # 1 of 2 is due: any
    3
    >>> newest_version([1, 1, 2, 2], version=3, bound=2, room=2, per_step=2)  # wait for both 1s
    1
    >>> newest_version([1, 2, 2, 2], version=3, bound=2, room=2, per_step=2)  # all 4 by step 4
    2
    """
    oldest = version - bound
    for later in range(bound):
        due = sum(dispatched <= oldest + later for dispatched in requested)
        if due >= room + later * per_step:
            return oldest + later
    return version


class Prefetcher:
    """The prompts of the present step, and of up to `max_steps_ahead` more, kept in flight.

    Example: two prompts a step, max_steps_ahead = 2:
        start(1)     requests 0 1
        prefetch(1)  requests 2 3, sampled while step 1 trains: one step, while that is enough
        start(2)     requests nothing; `collect` returns None at first: the step is late
        prefetch(2)  requests 4 5 6 7: two steps, since the engines are slower than the trainer
        start(3)     requests nothing; `collect` returns 4 5 at once
        prefetch(3)  requests nothing: 6 7 are in flight, one step

    Waits for: nothing. Unblocked by: as `Collection`.
    """

    def __init__(
        self,
        buffer: PromptBuffer,
        settings: RolloutSettings,
        steps: int,
        is_uninformative: Callable[[Group], bool] = attrgetter("zero_variance"),
    ) -> None:
        self._buffer = buffer
        self._settings = settings
        self._steps = steps
        self._is_uninformative = is_uninformative
        self._collection: Collection | None = None
        self._all_prefetched = False  # the present step's prompts
        self._late = False  # whether the step waited though all were

    def start(self, step: int) -> None:
        """Request the prompts that the step lacks, and start to collect it."""
        # A batch that is collected before the weight sync is of the step before's weights.
        off_policy = self._settings.collects_before_sync and step > 1
        self._all_prefetched = not self._fill(1, off_policy)
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
        steps_ahead = self._settings.max_steps_ahead
        ahead = steps_ahead if self._late else min(1, steps_ahead)
        # What is requested beyond the last step would never be trained on.
        self._fill(min(ahead, self._steps - step), off_policy=True)

    def _open(self, step: int) -> None:
        self._late = False
        self._collection = Collection(self._buffer, self._settings, step, self._is_uninformative)

    def _fill(self, steps: int, off_policy: bool) -> int:
        """Fill up to `steps` steps of prompts in flight; return the number of new prompts.

        Never more than are trained on before they are too old: `staleness_bound` steps, and one
        more unless they are `off_policy`: a version older than the first step that trains on them.
        """
        per_step, most = self._buffer.sampling.prompts_per_step, self._settings.staleness_bound
        oversampled = math.ceil(steps * per_step * self._settings.oversampling)
        count = min(oversampled, (most + (not off_policy)) * per_step)
        return self._buffer.request(dict.fromkeys(self._buffer.domains, count))
