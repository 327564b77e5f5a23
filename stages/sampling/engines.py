"""A stage's link to its engines: bring them the weights, sample, and keep what was drawn."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar, cast

from parallel.distributed import broadcast, is_main, on_main
from parallel.engine.answers import Question
from parallel.engine.fleet import Fleet
from parallel.engine.log import RolloutLog
from parallel.engine.scheduler import NoEngine, Scheduler, Task
from parallel.engine.wire import Generation, Sampling
from parallel.model.policy import Policy
from parallel.sample import Sample
from stages.data.problem import DomainError, Problem
from stages.data.tokenizer import load_tokenizer
from stages.objectives.groups import Group
from stages.sampling.recording import record, samples_file
from stages.settings import SamplingSettings, StageJob

PAUSE_SECONDS = 0.005  # between two looks at what has come: others are to use the cores meanwhile
TURN_SECONDS = 60.0  # the ranks that wait hear from the main one so often

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class _SampleRequest:
    """A sample's place, and whether it may come from the log and goes into it."""

    group: Group
    index: int
    logged: bool


class Rollouts:
    """The engines of one stage and its policy; every rank has one, and the main rank samples.

    Where there is a `log`, on the main rank, what it knows is not asked of the engines.
    """

    def __init__(self, job: StageJob, policy: Policy) -> None:
        self.job = job
        self.policy = policy
        self.version: int | None = None  # of the weights that the engines have
        self.tokenizer = load_tokenizer(job.settings.model)
        settings = job.settings
        self.fleet = Fleet(
            job.engine_addresses, settings.model, settings.layout, settings.engine, job.interface
        )
        self._scheduler: Scheduler | None = None
        if is_main():
            self._scheduler = Scheduler(
                self.fleet, settings.model, settings.deterministic, self._came
            )
        self.log: RolloutLog | None = None
        self._replayed = 0
        self._reported: dict[str, int] = {}
        self._ended = 0
        self.on_sample: Callable[[Group, int, Sample], None] = lambda group, index, sample: None
        self.awaited: Callable[[], bool] = lambda: False  # whether `wake` will be called

    @property
    def scheduler(self) -> Scheduler:
        """The main rank's."""
        assert self._scheduler is not None, "only the main rank samples"
        return self._scheduler

    def refit(self, version: int) -> dict[str, float]:
        """Bring every engine the policy's weights as they are now. Collective.

        Responses that are under way go on under them. Returns what there is to log.
        """
        with self._scheduler.held() if self._scheduler else nullcontext():
            measured = self.fleet.refit(self.policy, version)
        self.version = version
        return measured

    def request(
        self, groups: Iterable[Group], sampling: SamplingSettings, at_once: bool = False
    ) -> None:
        """Ask for the groups' samples. Main rank only.

        `at_once`: ahead of all others, of every engine, and never of the log.
        Raises DomainError when a prompt leaves no room for a response.
        """
        limit = sampling.max_response_tokens
        distribution = Sampling(
            sampling.temperature,
            limit,
            self.tokenizer.end_token,
            sampling.top_p,
            sampling.top_k,
        )
        tasks = []
        for group in groups:
            tokens = self._encode(group.problem, limit)
            for index in range(len(group.drawn)):
                seed = group.seed + index
                question = Question(group.problem.domain, tokens, seed, distribution)
                tasks.append(Task(_SampleRequest(group, index, logged=not at_once), question))
        known = [None] * len(tasks) if at_once else self._known(tasks)
        asked = zip(tasks, known, strict=True)
        self.scheduler.submit([task for task, sample in asked if sample is None], at_once)
        for task, sample in zip(tasks, known, strict=True):
            if sample is not None:
                self._replay(task, sample)

    def wait(self, ready: Callable[[], Answer | None], version: int) -> Answer:
        """What `ready` returns on the main rank, once it is not None, on every rank. Collective.

        It is asked again whenever samples came, or `wake` was called. When no engine is left, the
        next to live gets the policy's weights, now of `version`, and is asked for what is owed.
        """
        while True:
            answer, lost = None, False
            if is_main():
                try:
                    answer = self._receive_until(ready)
                except NoEngine:
                    lost = True
            answer, lost = broadcast((answer, lost))
            if lost:
                self.refit(version)
            elif answer is not None:
                return answer

    def whole(self, groups: list[Group], version: int) -> list[Sample]:
        """The samples of groups that the main rank asked for, on every rank. Collective."""

        def ready() -> list[Sample] | None:
            if any(group.ended is None for group in groups):
                return None
            return [sample for group in groups for sample in group.samples]

        return self.wait(ready, version)

    def drawn(self, version: int) -> None:
        """Note that nothing more is asked of these weights."""
        if self.log is not None:
            self.log.end(version)

    def forget(self, version: int) -> bool:
        """Draw anew what these weights and later ones are asked; whether the log had answered for
        these. Collective."""
        return on_main(lambda: self.log is not None and self.log.forget(version))

    def wake(self) -> None:
        """Have `wait` ask again, since what it waits for may be there. Any thread may do so."""
        self.scheduler.wake()

    def text(self, sample: Sample) -> str:
        """The response as text."""
        return self.tokenizer.decode(sample.response)

    def token_at(self, sample: Sample, characters: int) -> int:
        """The place in the response of the token that the first so many characters end with."""
        places = range(len(sample.response))
        decode = self.tokenizer.decode
        return bisect_left(
            places[:-1], characters, key=lambda place: len(decode(sample.response[: place + 1]))
        )

    def events(self) -> dict[str, float]:
        """What went wrong since the last call, and was mended; only the main rank knows."""
        if self._scheduler is None:
            return {}
        counts = {
            "requeued": self._scheduler.requeued,
            "duplicates": self._scheduler.duplicates,
            "engine_restarts": self.fleet.losses,
            "replayed": self._replayed,
        }
        new = {name: float(count - self._reported.get(name, 0)) for name, count in counts.items()}
        self._reported = counts
        return new

    def record(self, updates: list[list[Sample]], step: int) -> None:
        """Write the samples of each update of the step."""
        auditable = self.job.settings.logging.auditable
        path = samples_file(self.job.directory / "rollouts", step)
        record(path, updates, self.tokenizer.decode, auditable)

    def close(self) -> None:
        """Give up what is still under way."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self.log is not None:
            self.log.close()

    def _receive_until(self, ready: Callable[[], Answer | None]) -> Answer | None:
        deadline = time.monotonic() + TURN_SECONDS
        hopeful = True
        while (answer := ready()) is None and (left := deadline - time.monotonic()) > 0:
            time.sleep(PAUSE_SECONDS)
            more = self.awaited()
            expected = more or self.scheduler.owed > 0
            received = self._receive(left, more)
            # What `ready` awaits may have come while it looked: then it has to look once more.
            if not (received or expected or hopeful):
                raise RuntimeError("waiting for samples that nobody asked for")
            hopeful = received > 0 or expected
        return answer

    def _known(self, tasks: list[Task]) -> list[Sample | None]:
        if self.log is None or self.version is None:
            return [None] * len(tasks)
        return self.log.take(self.version, [task.question for task in tasks])

    def _replay(self, task: Task, sample: Sample) -> None:
        asked = cast(_SampleRequest, task.key)
        self._replayed += 1
        self.on_sample(asked.group, asked.index, sample)
        self.scheduler.supply(task, sample)

    def _came(self, task: Task, answer: Generation, sample: Sample) -> None:
        asked = cast(_SampleRequest, task.key)
        if asked.logged and self.log is not None:
            self.log.add(task.question, answer)
        self.on_sample(asked.group, asked.index, sample)

    def _receive(self, seconds: float, more: bool) -> int:
        """Put what ended into its groups; returns how many samples it was."""
        finished = self.scheduler.collect(seconds, more)
        for task, sample in finished:
            asked = cast(_SampleRequest, task.key)
            asked.group.drawn[asked.index] = sample
            if None not in asked.group.drawn:
                asked.group.ended = self._ended
                self._ended += 1
        return len(finished)

    def _encode(self, problem: Problem, response: int) -> list[int]:
        tokens = self.tokenizer.encode(problem.prompt)
        limit = self.job.settings.engine.max_model_tokens
        if len(tokens) + response > limit:
            raise DomainError(
                problem.domain,
                "prompts",
                f"the {len(tokens)} tokens of {problem.prompt!r} leave no room for"
                f" {response} tokens of response within engine.max_model_tokens = {limit};"
                " raise it, or ask for shorter prompts",
            )
        return tokens


@contextmanager
def stopwatch(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the time a block took to `seconds`."""
    start = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
