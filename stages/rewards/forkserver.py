"""The process that forks and kills reward workers: `python -m stages.rewards.forkserver FD`.

It imports the rewards' heavy modules once, without torch, and forks a worker in milliseconds. It
runs no reward itself and so always answers. When the pool is gone it kills its workers, even those
that hang, and all processes that rewards have started; where it is killed, the kernel kills its
workers.

Messages are plain tuples and lists: as __main__, this module shares no class with the pool's.
"""

from __future__ import annotations

import gc
import mmap
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import NoReturn

from parallel.machine.forkserver import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, prctl
from stages.data.problem import DomainError, Problem
from stages.rewards.reward import (
    REGISTERED,
    Grade,
    Grader,
    Response,
    RewardBase,
    RewardPoolSettings,
)

REAPING_SECONDS = 1.0  # between two rounds of reaping
ENDING_ROUNDS, ENDING_SECONDS = 100, 0.01  # of killing processes that still start others
FLUSH_SECONDS = 0.05  # longest wait of a grade for the rest of its chunk
REST_SECONDS = 60.0  # time limit between two responses of a chunk
CLOCK_BYTES = 24

# The message that starts the forkserver: each domain's rewards by name, the pool's settings, and
# the directory of the rewards' files.
Setup = tuple[Mapping[str, Mapping[str, RewardBase]], RewardPoolSettings, Path]
# Each response's number, and the rewards that are not run on it: the score of each, or None.
Chunk = list[tuple[int, Problem, Response, dict[str, float | None]]]
# A worker's first message: None once it is ready, or why it never will be; then its grades.
Answer = str | None | list[tuple[int, Grade]]


def main() -> None:
    """Fork and kill workers as the pool asks, until it is gone.

    As a subreaper this process becomes the parent of what rewards leave, so that none outlives it.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    # The stage decides when it ends. srun sends SIGUSR1, which asks the ranks to save, to every
    # process of theirs.
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(ignored, signal.SIG_IGN)
    control = Connection(int(sys.argv[1]))
    setup: Setup = control.recv()
    kinds = {
        reward.kind for domain_rewards in setup[0].values() for reward in domain_rewards.values()
    }
    # Before the first fork, so that all workers share their memory.
    for module in sorted({module for kind in kinds for module in REGISTERED[kind].imports}):
        with suppress(Exception):  # a worker reports the error
            import_module(module)
    gc.freeze()  # else garbage collection would copy shared pages into every worker
    workers: set[int] = set()
    with suppress(EOFError, OSError):
        while True:
            while not control.poll(REAPING_SECONDS):
                _reap(_children(os.getpid()) - workers)
            if (to_kill := control.recv()) is None:
                process = _fork(control, setup)
                workers.add(process)
                control.send(process)
            else:
                _kill([*_descendants(to_kill), to_kill])
                control.send(os.waitstatus_to_exitcode(os.waitpid(to_kill, 0)[1]))
                workers.remove(to_kill)
    for _ in range(ENDING_ROUNDS):
        if not (left := _descendants(os.getpid())):
            break
        _kill(left)
        time.sleep(ENDING_SECONDS)
        _reap(_children(os.getpid()))


def _fork(control: Connection, setup: Setup) -> int:
    """Return the process id of a new worker on the two descriptors that the pool sends."""
    theirs, shared = recv_handle(control), recv_handle(control)
    process = os.fork()
    if process == 0:
        # The pool notices the forkserver's end only once nobody else holds its connection.
        control.close()
        _work(setup, theirs, shared)
    os.close(theirs)
    os.close(shared)
    return process


def _work(setup: Setup, descriptor: int, shared: int) -> NoReturn:
    status = 1
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        limit = setup[1].memory_mebibytes << 20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        connection = Connection(descriptor)  # open until the end, which the pool waits for
        _serve(setup, connection, Clock(shared))
        status = 0
    except (EOFError, OSError):
        status = 0  # the pool is gone
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class Clock:
    """A worker's position, in memory shared with the pool.

    The response's number, the reward's index among its domain's, and the deadline.
    """

    def __init__(self, descriptor: int) -> None:
        self._shared = memoryview(mmap.mmap(descriptor, CLOCK_BYTES)).cast("d")

    def begin(self, number: int, reward: int, seconds: float) -> None:
        self._shared[1], self._shared[2] = reward, time.monotonic() + seconds
        self._shared[0] = number

    def rest(self) -> None:
        self.begin(-1, 0, REST_SECONDS)

    def read(self) -> tuple[int, int, float]:
        """Return the number, -1 between responses; the reward; the deadline by CLOCK_MONOTONIC."""
        return int(self._shared[0]), int(self._shared[1]), self._shared[2]


def _serve(setup: Setup, connection: Connection, clock: Clock) -> None:
    """Score chunks until the pool is gone."""
    domains, settings, directory = setup
    try:
        graders = {
            domain: Grader(domain, domain_rewards, directory)
            for domain, domain_rewards in domains.items()
        }
    except DomainError as error:
        connection.send(str(error))
        return
    connection.send(None)
    process = os.getpid()
    while True:
        chunk: Chunk = connection.recv()
        grades: list[tuple[int, Grade]] = []
        flushed = time.monotonic()
        for number, problem, response, fixed_scores in chunk:

            def begin(reward: int, seconds: float | None, number: int = number) -> None:
                clock.begin(number, reward, seconds or settings.timeout_seconds)

            grade = graders[problem.domain].grade(problem, response, begin, fixed_scores)
            grades.append((number, grade))
            if os.getpid() != process:  # a reward has forked, and its child returned
                os._exit(0)
            clock.rest()
            if time.monotonic() - flushed > FLUSH_SECONDS:
                connection.send(grades)
                grades, flushed = [], time.monotonic()
        if grades:
            connection.send(grades)


def _kill(processes: list[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _reap(processes: set[int]) -> None:
    """Reap the children that have exited."""
    for process in processes:
        with suppress(ChildProcessError):
            os.waitpid(process, os.WNOHANG)


def _descendants(process: int) -> list[int]:
    """Return the children of a process, their children, and so on."""
    children = _children(process)
    return [*children, *(descendant for child in children for descendant in _descendants(child))]


def _children(process: int) -> set[int]:
    try:
        threads = Path(f"/proc/{process}/task").iterdir()
        return {
            int(child) for thread in threads for child in (thread / "children").read_text().split()
        }
    except OSError:  # it has ended, or the kernel does not list them
        return set()


if __name__ == "__main__":
    main()
