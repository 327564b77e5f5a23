"""A process that scores responses: its messages, and the clock that it shares with the pool."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from stages.data.problem import DomainError, Problem
from stages.rewards.grading import Grade, Grader
from stages.rewards.registry import RewardSettings
from stages.rewards.reward import Response, RewardPoolSettings

FLUSH_SECONDS = 0.05  # longest wait of a grade for the rest of its chunk
REST_SECONDS = 60.0  # time limit between two responses of a chunk
CLOCK_BYTES = 24

# Each response's number, and the rewards that are not run on it: the score of each, or None.
Chunk = list[tuple[int, Problem, Response, dict[str, float | None]]]
Grades = list[tuple[int, Grade]]


@dataclass(frozen=True)
class Setup:
    """The message that starts the forkserver: of each domain, its rewards by name."""

    rewards: Mapping[str, Mapping[str, RewardSettings]]
    settings: RewardPoolSettings
    directory: Path


@dataclass(frozen=True)
class WorkerReady:
    """A worker's first message: it is ready, or `error` says why it never will be."""

    error: str | None = None


class Clock:
    """A worker's position, in memory shared with the pool.

    The response's number, the reward's index among its domain's, and the deadline.
    """

    def __init__(self, descriptor: int) -> None:
        self._shared = memoryview(mmap.mmap(descriptor, CLOCK_BYTES)).cast("d")

    def begin(self, number: int, reward: int, deadline: float) -> None:
        self._shared[1], self._shared[2] = reward, deadline
        self._shared[0] = number

    def rest(self) -> None:
        self.begin(-1, 0, time.monotonic() + REST_SECONDS)

    def read(self) -> tuple[int, int, float]:
        """Return the number, -1 between responses; the reward; the deadline by CLOCK_MONOTONIC."""
        return int(self._shared[0]), int(self._shared[1]), self._shared[2]


def serve(setup: Setup, connection: Connection, clock: Clock) -> None:
    """Score chunks until the pool is gone."""
    try:
        graders = {
            domain: Grader(domain, rewards, setup.directory)
            for domain, rewards in setup.rewards.items()
        }
    except DomainError as error:
        connection.send(WorkerReady(str(error)))
        return
    connection.send(WorkerReady())
    process = os.getpid()
    while True:
        chunk: Chunk = connection.recv()
        grades: Grades = []
        flushed = time.monotonic()
        for number, problem, response, known in chunk:

            def begin(reward: int, seconds: float | None, number: int = number) -> None:
                limit = setup.settings.timeout_seconds if seconds is None else seconds
                clock.begin(number, reward, time.monotonic() + limit)

            grade = graders[problem.domain].grade(problem, response, begin, known)
            grades.append((number, grade))
            if os.getpid() != process:  # a reward has forked, and its child returned
                os._exit(0)
            clock.rest()
            if time.monotonic() - flushed > FLUSH_SECONDS:
                connection.send(grades)
                grades, flushed = [], time.monotonic()
        if grades:
            connection.send(grades)
