"""Prompts that were begun and not yet trained on, and which of them a step takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from stages.data.problem import Problem
from stages.data.prompts import PromptStream
from stages.guards.measures import graded, is_right
from stages.guards.settings import CurriculumSettings, FrontierSettings
from stages.objectives.groups import Group, groups_of, seed_of
from stages.sampling.engines import Rollouts
from stages.sampling.frontier import Frontier
from stages.sampling.reward_dispatch import Scoring
from stages.settings import DomainSettings, RolloutSettings, SamplingSettings, StageJob


class Backlog:
    """The prompts of a stage from their streams to the step that trains on them; main rank only.

    A prompt leaves its stream once. It is trained on, or dropped and counted, or saved as begun, to
    be drawn anew by a stage that resumes.
    """

    def __init__(
        self,
        job: StageJob,
        domains: Mapping[str, DomainSettings],
        sampling: SamplingSettings,
        rollouts: Rollouts,
    ) -> None:
        self.domains = list(domains)
        self.sampling = sampling
        self._job = job
        self._prompts = {domain: settings.prompts for domain, settings in domains.items()}
        self._rewards = {domain: settings.rewards for domain, settings in domains.items()}
        self._rollouts = rollouts
        self._scoring = Scoring(job, domains, rollouts)
        self._streams = {domain: self._stream(domain, cursor=0) for domain in domains}
        self._frontiers = {
            domain: frontier
            for domain, settings in domains.items()
            if (frontier := self._frontier(domain, settings.curriculum)) is not None
        }
        self._saved: dict[str, deque[int]] = {domain: deque() for domain in domains}
        self._begun: dict[str, list[Group]] = {domain: [] for domain in domains}
        self._told_too_long = 0  # of what the streams counted

    def begin(self, wanted: Mapping[str, int]) -> int:
        """Ask for samples of further prompts, until so many of each domain are begun; returns how
        many prompts that were."""
        groups = []
        for domain, count in wanted.items():
            new = [self._next(domain) for _ in range(count - len(self._begun[domain]))]
            groups += [self._group(problem) for problem in new]
        self._ask(groups)
        return len(groups)

    def again(self, groups: list[Group], attempt: int) -> None:
        """Ask for other samples of the same prompts."""
        self._ask([self._group(group.problem, attempt) for group in groups])

    def probes(self, count: int, purpose: str, longest: int) -> list[Group]:
        """Ask for one short response to each of the next prompts, which stay in their stream."""
        domain = self.domains[0]
        problems = self._stream(domain, self._streams[domain].cursor).take(count)
        seed = seed_of(self._job.settings.seed, self._job.stage, domain, purpose)
        groups = groups_of(problems, 1, seed)
        limit = min(longest, self.sampling.max_response_tokens)
        short = self.sampling.model_copy(update={"max_response_tokens": limit})
        self._rollouts.request(groups, short, at_once=True)
        return groups

    def begun(self, domain: str) -> list[int]:
        """The versions of the weights that the groups under way were begun with."""
        return [group.begun for group in self._begun[domain]]

    def take(self, domain: str, latest: int) -> Group | None:
        """The group of a domain that was whole first, of those that were begun with weights of this
        version or before; None until it is graded.

        In whatever order grades come, groups are taken in the order in which they were whole.
        """
        groups = [group for group in self._begun[domain] if group.begun <= latest]
        whole = [group for group in groups if group.ended is not None]
        if not whole:
            return None
        group = min(whole, key=lambda each: each.ended or 0)
        if not self._scoring.done(group):
            return None
        self._begun[domain].remove(group)
        return group

    def hold_to_limit(self, failures: list[str]) -> None:
        """Raise RewardError where a step leaves too many samples without a reward."""
        a_domain = self.sampling.prompts_per_step * self.sampling.group_size
        self._scoring.hold_to_limit(failures, a_domain * len(self.domains))

    def learn(self, groups: list[Group]) -> None:
        """Tell the curricula what the samples of a step's groups earned."""
        for group in groups:
            domain = group.problem.domain
            if domain in self._frontiers:
                right = [is_right(sample, self._rewards[domain]) for sample in graded(group)]
                self._frontiers[domain].learn(group.problem, sum(right), len(right) - sum(right))

    def passed_over(self) -> dict[str, float]:
        """How many prompts the curricula passed over since the last call, where there are any."""
        counts = [frontier.passed_over() for frontier in self._frontiers.values()]
        return {"passed_over": float(sum(counts))} if counts else {}

    def too_long(self) -> float:
        """How many prompts were skipped for their length since the last call."""
        count = self._untold_too_long()
        self._told_too_long += count
        return float(count)

    def state(self) -> dict[str, Any]:
        """Where every domain's prompts continue, those before that were begun, how many were too
        long and are not told yet, and what the curricula have learned, as JSON."""
        learned = {domain: each.state() for domain, each in self._frontiers.items()}
        return {
            "cursors": {domain: stream.cursor for domain, stream in self._streams.items()},
            "begun": {
                domain: [*self._saved[domain], *(group.problem.index for group in begun)]
                for domain, begun in self._begun.items()
            },
            "too_long": self._untold_too_long(),
            **({"curricula": learned} if learned else {}),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue there; what was begun is drawn again, by the weights of today."""
        for domain in self.domains:
            self._streams[domain] = self._stream(domain, state["cursors"][domain])
            self._saved[domain] = deque(sorted(state["begun"][domain]))
        # Older versions did not save it; it is of a metric, and the training goes on as it was.
        self._told_too_long = -state.get("too_long", 0)
        for domain, frontier in self._frontiers.items():
            frontier.restore(state["curricula"][domain])

    def close(self) -> None:
        """Leave what is not graded."""
        self._scoring.close()

    def _untold_too_long(self) -> int:
        counted = sum(stream.too_long for stream in self._streams.values())
        return counted - self._told_too_long

    def _ask(self, groups: list[Group]) -> None:
        for group in groups:
            group.begun = self._rollouts.version or 0
            self._begun[group.problem.domain].append(group)
        if groups:
            self._scoring.expect(groups)
            self._rollouts.request(groups, self.sampling)

    def _group(self, problem: Problem, attempt: int = 0) -> Group:
        purpose = f"prompt {problem.index}, attempt {attempt}"
        seed = seed_of(self._job.settings.seed, self._job.stage, problem.domain, purpose)
        [group] = groups_of([problem], self.sampling.group_size, seed)
        return group

    def _next(self, domain: str) -> Problem:
        if self._saved[domain]:
            return self._stream(domain, self._saved[domain].popleft()).take(1)[0]
        stream = self._streams[domain]
        if domain in self._frontiers:
            return self._frontiers[domain].take(stream)
        return stream.take(1)[0]

    def _frontier(self, domain: str, settings: CurriculumSettings) -> Frontier | None:
        if not isinstance(settings, FrontierSettings):
            return None
        encode = self._rollouts.tokenizer.encode
        seed = seed_of(self._job.settings.seed, self._job.stage, domain, "curriculum")
        return Frontier(settings, domain, lambda prompt: len(encode(prompt)), seed)

    def _stream(self, domain: str, cursor: int) -> PromptStream:
        settings = self._job.settings
        return PromptStream(
            self._prompts[domain],
            self._rollouts.tokenizer,
            domain,
            settings.seed,
            self._job.stage,
            cursor=cursor,
            longest=settings.longest_prompt(self.sampling),
        )


@dataclass
class Batch:
    """What a step trains on, in the order in which the prompts were begun; and what was drawn
    beside it: groups that were `replaced` because they were flat, and samples `too_old`. Of
    `failures` samples, all of these counted, the reward is None; `watch_failures` times a reward of
    weight 0 failed on one."""

    groups: list[Group]
    replaced: list[Group]
    too_old: int
    failures: int
    watch_failures: int

    @property
    def drawn(self) -> list[Group]:
        """All groups that were not too old."""
        return [*self.groups, *self.replaced]


@dataclass
class _Taken:
    """One domain's part of a batch that is not complete yet."""

    rounds: int
    uneven: list[Group] = field(default_factory=list)
    flat: list[Group] = field(default_factory=list)
    replaced: list[Group] = field(default_factory=list)

    @property
    def groups(self) -> list[Group]:
        return sorted([*self.uneven, *self.flat], key=lambda group: group.problem.index)

    def replace_flat(self) -> None:
        """Use a round, if one is left, to have others in place of the flat ones."""
        if self.flat and self.rounds:
            self.rounds -= 1
            self.replaced += self.flat
            self.flat = []


class Collection:
    """Takes one step's groups from the backlog as they become whole; main rank only.

    Whether a prompt is trained on does not depend on how long its responses take: groups that have
    to be taken now, or else would grow too old before steps have room for them, are waited for.

    `version` is that of the weights that the step begins with; `flat` says of which groups there is
    nothing to learn.
    """

    def __init__(
        self,
        backlog: Backlog,
        settings: RolloutSettings,
        version: int,
        flat: Callable[[Group], bool] = attrgetter("flat"),
    ) -> None:
        self._backlog = backlog
        self._flat = flat
        self._settings = settings
        self._version = version
        self._too_old = 0
        self._failures: list[str] = []
        self._watch_failures = 0
        rounds = settings.dynamic_sampling
        self._taken = {domain: _Taken(rounds) for domain in backlog.domains}

    def batch(self) -> Batch | None:
        """The whole batch, or None while some of it is to come.

        Raises RewardError where too many samples of it have no reward.
        """
        for domain, taken in self._taken.items():
            while self._missing(taken):
                latest = self._latest(domain, self._missing(taken))
                if (group := self._backlog.take(domain, latest)) is None:
                    break
                self._sort(taken, group)
        missing = {domain: self._missing(taken) for domain, taken in self._taken.items()}
        if any(missing.values()):
            self._backlog.begin(missing)
            return None
        parts = self._taken.values()
        batch = Batch(
            groups=[group for taken in parts for group in taken.groups],
            replaced=[group for taken in parts for group in taken.replaced],
            too_old=self._too_old,
            failures=len(self._failures),
            watch_failures=self._watch_failures,
        )
        # In the order of the prompts, since that in which groups came is not the same twice.
        self._backlog.learn(sorted(batch.drawn, key=lambda group: group.problem.index))
        return batch

    def _latest(self, domain: str, room: int) -> int:
        """The version of the weights that the next group must have been begun with, or older ones:
        where this step has room for so many more groups, and the steps after it for whole steps of
        them, all that are under way should be trained on before they are too old."""
        begun = self._backlog.begun(domain)
        oldest = self._version - self._settings.max_staleness
        for later in range(self._settings.max_staleness):
            due = sum(version <= oldest + later for version in begun)
            if due >= room + later * self._backlog.sampling.prompts_per_step:
                return oldest + later
        return self._version

    def _sort(self, taken: _Taken, group: Group) -> None:
        self._failures += group.failures
        self._watch_failures += len(group.watch_failures)
        self._backlog.hold_to_limit(self._failures)
        if self._version - group.weight_version > self._settings.max_staleness:
            self._too_old += len(group.samples)
            return
        (taken.flat if self._flat(group) else taken.uneven).append(group)
        if not self._missing(taken):
            taken.replace_flat()

    def _missing(self, taken: _Taken) -> int:
        wanted = self._backlog.sampling.prompts_per_step
        return wanted - len(taken.uneven) - len(taken.flat)
