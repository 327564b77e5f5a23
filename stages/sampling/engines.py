"""A stage's link to its engines: weight syncs to them, samples and grades from them."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import TypeVar, cast

from parallel.distributed import broadcast, is_main, on_main
from parallel.engine.fleet import AllLost, Fleet
from parallel.engine.log import RolloutLog
from parallel.engine.scheduler import NoEngine, Scheduler, Task
from parallel.engine.wire import Generation, GenerationRequest, Sampling, model_digest
from parallel.files import read_checkpoint
from parallel.model.offload import DeviceShare
from parallel.model.policy import Policy
from parallel.sample import Sample
from parallel.timeline import phase
from stages.data.problem import DomainError, Problem
from stages.data.tokenizer import Tokenizer, load_tokenizer
from stages.domains import DomainSettings, RolloutSettings, SamplingSettings
from stages.objectives.groups import Group
from stages.rewards.pool import RewardPool
from stages.rewards.reward import Response
from stages.sampling.recording import Rewards, record, record_loads
from stages.sampling.sample_files import samples_file
from stages.settings import StageJob

PAUSE_SECONDS = 0.005  # between two looks at what arrived: engines share the cores
TURN_SECONDS = 60.0  # the longest that the other ranks wait for word from the main rank

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class _SampleRequest:
    """A sample's place in its group, and whether it may come from the log and goes into it."""

    group: Group
    index: int
    logged: bool


class StageEngines:
    """The engines and reward workers of one stage; every rank has one, and the main rank samples.

    Every sample of `domains` is sent to its rewards as soon as the engine returns it. Responses
    that the main rank's `log` holds are not requested from the engines.

    Example: 2 groups of 4 samples in step 3:
        sync_weights(3)         every engine has version 3
        request(groups, ...)    8 tasks, dealt to the engines; 0 or more come from the log
        wait(ready, 3)          every rank has what `ready` returned on the main rank
        sleep()                 on shared devices: the engines free them until the next sync
    """

    def __init__(
        self,
        job: StageJob,
        policy: Policy,
        domains: Mapping[str, DomainSettings],
        log: RolloutLog | None = None,
    ) -> None:
        self.job, self.policy, self.log = job, policy, log
        self.files = job.files
        self.version: int | None = None  # of the weights that the engines have
        self.graded_by = {name: domain.rewards for name, domain in domains.items()}
        settings = job.settings
        self.tokenizer = load_tokenizer(settings.model)
        self.fleet = Fleet(
            job.engine_addresses, settings.model, settings.layout, settings.engine, job.interface
        )
        self.share = DeviceShare.beside(settings.engine)
        self.share.add(policy.residency)
        self._scheduler: Scheduler | None = None
        self._rewards: RewardDispatcher | None = None
        if is_main():
            self._scheduler = Scheduler(
                self.fleet, settings.model, settings.deterministic, self._take
            )
            if domains:
                self._rewards = RewardDispatcher(
                    job, self.graded_by, self.tokenizer, self.scheduler.wake
                )
        self._replayed = 0
        self._reported: dict[str, int] = {}
        self._ended = 0

    @property
    def scheduler(self) -> Scheduler:
        assert self._scheduler is not None, "only the main rank samples"
        return self._scheduler

    @property
    def rewards(self) -> RewardDispatcher:
        assert self._rewards is not None, "only the main rank grades, and only for domains"
        return self._rewards

    def sync_weights(self, version: int) -> dict[str, float]:
        """Send the policy's present weights to every engine; return the metrics. Collective.

        Responses in flight continue under the new weights. Where engines share the trainer's
        devices, their turn begins: only the policy's weights are there while it sends them, and
        nothing of the trainer when the engines allocate their caches, or when one starts.
        """
        measured: dict[str, float] | None = None
        with self._scheduler.held() if self._scheduler else nullcontext():
            while measured is None:
                with phase("wait", waits_for="engines"):
                    self.fleet.await_engines(self.share.only)
                self.share.only(self.policy.residency)
                with suppress(AllLost):  # the next to start needs the room of these weights
                    measured = self.fleet.refit(self.policy, version)
            self.share.only()
            self.fleet.open_caches()
        self.version = version
        return measured

    def sleep(self) -> None:
        """End the turn of engines that share the trainer's devices. Collective.

        They have no weights until the next sync. No response may be in flight.
        """
        if not self.fleet.sleeps or self.version is None:
            return
        in_flight = on_main(lambda: self.scheduler.owed)
        if in_flight:
            raise RuntimeError(
                f"{in_flight} responses are in flight and their engines are to sleep"
            )
        self.fleet.sleep()
        self.version = None

    def turn_seconds(self) -> dict[str, float]:
        """Return the seconds of turns and of engines' starts since the last call, where any."""
        spent: dict[str, float] = {}
        if self.fleet.start_seconds:
            spent["seconds_start"], self.fleet.start_seconds = self.fleet.start_seconds, 0.0
        if self.share.active:
            spent["seconds_offload"] = self.share.take_seconds()
        if self.fleet.sleeps:
            spent["seconds_wake"], self.fleet.seconds = self.fleet.seconds, 0.0
        return spent

    def request(
        self, groups: Iterable[Group], sampling: SamplingSettings, at_once: bool = False
    ) -> None:
        """Request the samples of groups. Main rank only.

        With `at_once`: ahead of all others, from every engine, and never from the log.
        Raises DomainError when a prompt leaves no room for a response.
        """
        limit, ends = sampling.max_response_tokens, self.tokenizer.end_tokens
        distribution = Sampling(sampling.temperature, limit, ends, sampling.top_p, sampling.top_k)
        tasks = []
        for group in groups:
            tokens = self._encode(group.problem, limit)
            for index in range(len(group.slots)):
                seed = group.seed + index
                question = GenerationRequest(group.problem.domain, tokens, seed, distribution)
                tasks.append(Task(_SampleRequest(group, index, logged=not at_once), question))
        logged: list[Sample | None] = [None] * len(tasks)
        if self.log is not None and self.version is not None and not at_once:
            logged = self.log.take(self.version, [task.request for task in tasks])
        pairs = list(zip(tasks, logged, strict=True))
        self.scheduler.submit([task for task, sample in pairs if sample is None], at_once)
        for task, sample in pairs:
            if sample is not None:
                self._replayed += 1
                # Before it is supplied: every sample of a group that has ended has its grade
                # pending.
                self._dispatch(task, sample)
                self.scheduler.supply(task, sample)

    def wait(self, ready: Callable[[], Answer | None], version: int) -> Answer:
        """Return, on every rank, the first result of the main rank's `ready` that is not None.

        Collective. `ready` is called again whenever samples or grades arrive. When no engine is
        left, the next one to start gets the policy's weights, now of `version`, and the requests.

        Waits for: on the main rank, samples and grades; on the others, its broadcast, which comes
            every TURN_SECONDS at the latest, so that no collective of theirs times out.
        Unblocked by: engine threads that put samples into `Scheduler.collect`, and reward workers
            that call `Scheduler.wake`.
        """
        while True:
            answer, lost = None, False
            if is_main():
                try:
                    with phase("wait", waits_for="engines and rewards"):
                        answer = self._receive_until(ready)
                except NoEngine:
                    lost = True
            with phase("wait", waits_for="rank 0"):
                answer, lost = broadcast((answer, lost))
            if lost:
                self.sync_weights(version)
            elif answer is not None:
                return answer

    def wait_for(self, groups: list[Group], version: int) -> list[Sample]:
        """Return on every rank the samples of groups that the main rank requested. Collective."""

        def ready() -> list[Sample] | None:
            if any(group.ended is None for group in groups):
                return None
            return [sample for group in groups for sample in group.samples]

        return self.wait(ready, version)

    def drop_covered_log(self) -> None:
        """Drop the log of steps that a checkpoint holds."""
        if self.log is not None:
            checkpoints = self.files.whole_checkpoints()
            self.log.cover(checkpoints[-1].step if checkpoints else 0)

    def forget_log(self, version: int) -> bool:
        """Drop the log's responses of `version` on; return whether any was used. Collective."""
        return on_main(lambda: self.log is not None and self.log.forget(version))

    def events(self) -> dict[str, float]:
        """Return what failed and was repaired since the last call; only the main rank knows."""
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

    def record(self, updates: list[list[Sample]], step: int) -> dict[str, float]:
        """Write the samples of each update of the step; return the metrics of their routes."""
        path, logging = samples_file(self.files.rollouts, step), self.job.settings.logging
        record(path, step, updates, self.tokenizer, self.graded_by, logging.auditable)
        samples = [sample for update in updates for sample in update]
        loads = samples_file(self.files.routing, step)
        return record_loads(loads, step, samples, self.job.settings.model.experts, logging.tokens)

    def close(self) -> None:
        """Drop the requests in flight, stop the reward workers, and end the engines' turn."""
        # The scheduler first: its threads log responses, and dispatch them to the rewards.
        for resource in (self._scheduler, self.log, self._rewards):
            if resource is not None:
                resource.close()
        self.sleep()

    def _receive_until(self, ready: Callable[[], Answer | None]) -> Answer | None:
        deadline = time.monotonic() + TURN_SECONDS
        hopeful = True
        while (answer := ready()) is None and (left := deadline - time.monotonic()) > 0:
            time.sleep(PAUSE_SECONDS)
            grades = self._rewards is not None and self._rewards.pending
            expected = grades or self.scheduler.owed > 0
            received = self.scheduler.collect(left, grades)
            for task, sample in received:
                request = cast(_SampleRequest, task.key)
                request.group.slots[request.index] = sample
                if None not in request.group.slots:
                    request.group.ended = self._ended
                    self._ended += 1
            # The last sample or grade may arrive while `ready` looks: then it looks once more.
            if not (received or expected or hopeful):
                raise RuntimeError("waiting for samples that were never requested")
            hopeful = bool(received) or expected
        return answer

    def _take(self, task: Task, answer: Generation, sample: Sample) -> None:
        """Log a response and dispatch it to its rewards; called in an engine's thread."""
        if cast(_SampleRequest, task.key).logged and self.log is not None:
            self.log.add(task.request, answer)
        self._dispatch(task, sample)

    def _dispatch(self, task: Task, sample: Sample) -> None:
        request = cast(_SampleRequest, task.key)
        if self._rewards is not None:
            self._rewards.dispatch(request.group, request.index, sample)

    def _encode(self, problem: Problem, response: int) -> list[int]:
        tokens = self.tokenizer.encode(problem.prompt)
        limit = self.job.settings.engine.max_model_tokens
        if len(tokens) + response > limit:
            raise DomainError(
                problem.domain,
                "prompts",
                f"the {len(tokens)} tokens of {problem.prompt!r} leave no room for"
                f" {response} tokens of response within engine.max_model_tokens = {limit};"
                " raise it, or shorten the prompts",
            )
        return tokens


class RewardDispatcher:
    """The reward workers of a stage's domains, sent each sample as soon as it is sampled.

    Main rank only. `wake` is called from another thread whenever a grade arrives.

    Waits for: nothing. `graded` is False while a grade of the group is missing.
    Unblocked by: the pool's thread, which completes the futures and calls `wake`.

    Example: one group of 2 samples:
        expect([group])               grades = [None, None]
        dispatch(group, 1, sample)    grades = [None, Future]; called in an engine's thread
        graded(group)                 False: sample 0 is in flight
        dispatch(group, 0, sample)    grades = [Future, Future]
        graded(group)                 True once both are done; sample.reward = 1.0, and so on
    """

    def __init__(
        self,
        job: StageJob,
        rewards: Rewards,
        tokenizer: Tokenizer,
        wake: Callable[[], None],
    ) -> None:
        self._decode = tokenizer.decode
        self._pool = RewardPool(rewards, job.settings.rewards, job.directory, wake)

    @property
    def pending(self) -> bool:
        """True while grades are in flight, so that `wake` will be called again."""
        return self._pool.pending > 0

    def expect(self, groups: Iterable[Group]) -> None:
        """Have groups graded that are about to be requested."""
        for group in groups:
            group.grades = [None] * len(group.slots)

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
            sample.problem, sample.answer = group.problem.key, group.problem.answer
            sample.reward, sample.reward_parts = grade.reward, grade.parts
            sample.reward_messages, sample.reward_failure = grade.messages or None, grade.failure
            if grade.steps:
                steps = grade.steps
                sample.step_rewards = [
                    (self._token_at(sample, end), reward) for end, reward in steps
                ]
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


def rollout_log(
    job: StageJob, sampling: SamplingSettings, settings: RolloutSettings
) -> RolloutLog | None:
    """Open a stage's rollout log, whose origin is all that decides a response but the request.

    None where the run keeps none. What an attempt with one left is then deleted: a later attempt
    with one again would replay responses of weights that this one replaces.
    """
    directory = job.files.rollouts / "log"
    if not job.settings.logging.response_log:
        shutil.rmtree(directory, ignore_errors=True)
        return None
    parent = read_checkpoint(job.parent) if job.parent is not None else None
    model, deterministic = job.settings.model, job.settings.deterministic
    digests = [model_digest(model), parent and parent.digest]
    dumps = [sampling.model_dump(), settings.model_dump()]
    decisive = json.dumps([job.seeded_as, deterministic, *digests, *dumps])
    origin = hashlib.sha256(decisive.encode()).hexdigest()
    return RolloutLog(directory, origin, model, deterministic)
