"""The prompts of a stage: chosen by its curriculum, requested, and not yet trained on."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from stages.data.problem import DomainError, Problem
from stages.data.prompts import PromptStream
from stages.guards.measures import graded, is_right
from stages.guards.settings import FrontierSettings
from stages.objectives.groups import Group, groups_of, seed_of
from stages.sampling.engines import StageEngines
from stages.settings import DomainSettings, SamplingSettings, StageJob

DIFFICULTIES = 4096  # remembered at once; the least recently seen are forgotten first


class PromptBuffer:
    """A stage's prompts, from their streams to the step that trains on them; main rank only.

    A prompt leaves its stream once. It is trained on, or dropped and counted, or saved as in
    flight and requested again when the stage resumes.
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

    def request(self, wanted: Mapping[str, int]) -> int:
        """Request prompts until `wanted` of each domain are in flight; return how many are new."""
        groups = []
        for domain, count in wanted.items():
            new = count - len(self._in_flight[domain])
            groups += [self._group(self._next(domain)) for _ in range(new)]
        self._request(groups)
        return len(groups)

    def redraw(self, groups: list[Group], attempt: int) -> None:
        """Request other samples of the prompts of `groups`."""
        self._request([self._group(group.problem, attempt) for group in groups])

    def probes(self, count: int, purpose: str, longest: int) -> list[Group]:
        """Request one short response to each of the next prompts, which stay in their stream."""
        domain = next(iter(self.domains))
        problems = self._stream(domain, self._streams[domain].cursor).take(count)
        seed = seed_of(self._job.settings.seed, self._job.stage, domain, purpose)
        groups = groups_of(problems, 1, seed)
        limit = min(longest, self.sampling.max_response_tokens)
        short = self.sampling.model_copy(update={"max_response_tokens": limit})
        self._engines.request(groups, short, at_once=True)
        return groups

    def versions_in_flight(self, domain: str) -> list[int]:
        """Return the weight version under which each group in flight was requested."""
        return [group.begun for group in self._in_flight[domain]]

    def take(self, domain: str, latest: int) -> Group | None:
        """Take the first whole group of a domain, requested under version `latest` or older.

        Return None until it is graded: groups are taken in the order in which they became whole,
        in whatever order grades arrive.
        """
        groups = [group for group in self._in_flight[domain] if group.begun <= latest]
        whole = [group for group in groups if group.ended is not None]
        if not whole:
            return None
        group = min(whole, key=lambda each: each.ended or 0)
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
                right = [is_right(sample, rewards) for sample in graded(group)]
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
        learned = {domain: each.state() for domain, each in self._frontiers.items()}
        return {
            "cursors": {domain: stream.cursor for domain, stream in self._streams.items()},
            "begun": {
                domain: [*self._saved[domain], *(group.problem.index for group in groups)]
                for domain, groups in self._in_flight.items()
            },
            "too_long": self._unreported_too_long(),
            **({"curricula": learned} if learned else {}),
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
            group.begun = self._engines.version or 0
            self._in_flight[group.problem.domain].append(group)
        if groups:
            self._engines.rewards.expect(groups)
            self._engines.request(groups, self.sampling)

    def _group(self, problem: Problem, attempt: int = 0) -> Group:
        purpose = f"prompt {problem.index}, attempt {attempt}"
        seed = seed_of(self._job.settings.seed, self._job.stage, problem.domain, purpose)
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
        seed = seed_of(self._job.settings.seed, self._job.stage, domain, "curriculum")
        return Frontier(settings, domain, lambda prompt: len(encode(prompt)), seed)

    def _stream(self, domain: str, cursor: int) -> PromptStream:
        settings = self._job.settings
        return PromptStream(
            self.domains[domain].prompts,
            self._engines.tokenizer,
            domain,
            settings.seed,
            self._job.stage,
            cursor=cursor,
            longest=settings.longest_prompt(self.sampling),
        )


class Frontier:
    """A curriculum that prefers one domain's prompts at the frontier of what the policy can solve.

    A group whose samples are all right or all wrong teaches nothing; the samples of a prompt that
    is solved with probability p differ with variance p (1 - p). So p is estimated for every
    difficulty (a length, or the value of a field) from the stage's own samples, and of the stream's
    next candidates the one with the largest p (1 - p) is taken. p is sampled from its posterior
    instead of set to its mean (Thompson 1933), so that rare difficulties are tried.

    Endless streams and files behave alike: a row that is passed over returns after all other rows.
    With c candidates a difficulty comes at most c times as often as in the stream, and none is shut
    out: one whose share of the stream is s is taken at least s^c of the time.

    `length` counts a prompt's tokens. The choice is a pure function of the seed, the stream's
    cursor and the solve rates. Main rank only.
    """

    def __init__(
        self, settings: FrontierSettings, domain: str, length: Callable[[str], int], seed: int
    ) -> None:
        self._settings, self._domain = settings, domain
        self._length, self._seed = length, seed
        self._tallies: dict[str, tuple[float, float]] = {}  # right and wrong, oldest first
        self._passed_over = 0

    def take(self, stream: PromptStream) -> Problem:
        """Return the best of the stream's next candidates; the stream continues after the last.

        Raises DomainError when a prompt lacks the field that states its difficulty.
        """
        draw = Random(seed_of(self._seed, stream.cursor))
        candidates = stream.take(self._settings.candidates)
        self._passed_over += len(candidates) - 1

        def promise(problem: Problem) -> float:  # p (1 - p), p from Beta(1 + right, 1 + wrong)
            right, wrong = self._tallies.get(self.difficulty(problem), (0.0, 0.0))
            chance = draw.betavariate(1 + right, 1 + wrong)
            return chance * (1 - chance)

        return max(candidates, key=promise)

    def update(self, problem: Problem, right: int, wrong: int) -> None:
        """Count the samples of a prompt that solved it, and those that did not."""
        difficulty = self.difficulty(problem)
        before = self._tallies.pop(difficulty, (0.0, 0.0))
        tally = before[0] + right, before[1] + wrong
        shrink = min(1.0, self._settings.memory / max(sum(tally), 1))
        self._tallies[difficulty] = tally[0] * shrink, tally[1] * shrink
        if len(self._tallies) > DIFFICULTIES:
            del self._tallies[next(iter(self._tallies))]

    def difficulty(self, problem: Problem) -> str:
        """Return the name of a prompt's difficulty."""
        if self._settings.field is None:
            step = self._settings.length_step
            return str(self._length(problem.prompt) // step * step)
        return json.dumps(self._value(problem, self._settings.field), sort_keys=True, default=str)

    def passed_over(self) -> int:
        """Return the number of prompts passed over since the last call."""
        count, self._passed_over = self._passed_over, 0
        return count

    def state(self) -> dict[str, Any]:
        """Return the solve rates and the unreported count as JSON."""
        tallies = [[name, *tally] for name, tally in self._tallies.items()]
        return {"tallies": tallies, "passed_over": self._passed_over}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self._tallies = {name: (right, wrong) for name, right, wrong in state["tallies"]}
        self._passed_over = state["passed_over"]

    def _value(self, problem: Problem, field: str) -> Any:
        value: Any = problem.fields
        for part in field.split("."):
            if not isinstance(value, Mapping) or part not in value:
                known = ", ".join(sorted(map(str, value))) if isinstance(value, Mapping) else "none"
                raise DomainError(
                    self._domain,
                    "curriculum.field",
                    f"the row of {problem.prompt!r} has no field {field}; at {part} it has {known}",
                )
            value = value[part]
        return value
