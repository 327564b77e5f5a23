"""The pool of processes that score responses, so that no reward can hang or end a stage.

A thread sends chunks of responses to the workers and collects grades. A worker whose reward times
out is killed and replaced; only that response is affected, the rest of its chunk goes to other
workers. `forkserver` is the other end.

pebble's ProcessPool was tried (5.2.3): it leaves a killed worker's children and a daemonised
process alive, a hanging worker outlives a stage that SIGKILL ends, an idle worker that is stopped
blocks its task for ever, and a timeout applies to a task, not to each of its rewards.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.reduction import send_handle
from pathlib import Path

from parallel.errors import ERRORS, STATUS_DESCRIPTOR, report_notice
from stages.data.problem import Problem
from stages.rewards.forkserver import CLOCK_BYTES, Answer, Chunk, Clock, Setup
from stages.rewards.reward import (
    Grade,
    Response,
    RewardBase,
    RewardError,
    RewardPoolSettings,
    cautions,
    check_machine,
    failure,
)

MOST_CORES, WAITING_WORKERS = 8, 16
LONGEST_CHUNK = 32  # responses in one message
TURNS = 2  # chunks per worker that the queue is split into, so that all finish at about one time
LOOK_SECONDS = 0.25  # between two checks of the clocks of busy workers
LOADING_SECONDS = 300.0
FORKSERVER_SECONDS = 60.0  # to fork a worker, or to kill one
CLOSING_SECONDS = 5.0  # for the forkserver to kill all workers
ENDING_SECONDS = 5.0  # for the forkserver to exit once its connection is broken
PRINTING_SECONDS = 1.0  # to log the rest of the workers' output
LARGEST_OUTPUT, PIECE = 16 << 20, 1 << 16  # bytes that the rewards of one attempt may print
ATTEMPTS = 3  # lost workers after which a response fails, where no reward is to blame
SHOWN_IN_FULL, SHOWN_CHARACTERS = 3, 300


@dataclass(eq=False)
class _Task:
    problem: Problem
    response: Response
    future: Future[Grade]
    attempts: int = 0
    fixed_scores: dict[str, float | None] = field(default_factory=dict)  # as in a `Chunk`
    watch_failures: list[str] = field(default_factory=list)  # of rewards of weight 0


@dataclass(eq=False)
class _Worker:
    process: int
    connection: Connection
    clock: Clock
    loaded: bool = False
    tasks: dict[int, _Task] = field(default_factory=dict)


class RewardPool:
    """The rewards of several domains, of each domain by their names.

    `on_graded` is called, in the pool's thread, whenever grades arrive. The pool's files are in
    `directory`. Raises DomainError where this machine cannot run a reward.

    Example: 2 workers and 6 responses to a problem: `submit` returns 6 futures. The queue is dealt
    in chunks of ceil(6 / 4) = 2, ceil(4 / 4) = 1, then 1 to each worker that is idle again.

    Waits for: `submit` for nothing. The pool's thread waits for a submission, a worker's message,
        or LOOK_SECONDS while a worker is busy. A future waits for its grade.
    Unblocked by: `submit` and `close` write to the eventfd `_called`, and a worker sends grades
        every FLUSH_SECONDS. A reward that hangs is killed at its time limit, which grades its
        response; where the forkserver is lost, all futures raise RewardError.
    """

    def __init__(
        self,
        rewards: Mapping[str, Mapping[str, RewardBase]],
        settings: RewardPoolSettings,
        directory: Path,
        on_graded: Callable[[], None] = lambda: None,
    ) -> None:
        check_machine(rewards)
        for line in cautions(rewards):
            report_notice(line)
        self._rewards = {domain: dict(domain_rewards) for domain, domain_rewards in rewards.items()}
        self._settings = settings
        self._setup: Setup = (self._rewards, settings, directory)
        self._on_graded = on_graded
        waits = any(
            reward.waits
            for domain_rewards in rewards.values()
            for reward in domain_rewards.values()
        )
        cores = min(len(os.sched_getaffinity(0)), MOST_CORES)
        self._size = settings.workers or (WAITING_WORKERS if waits else cores)
        self._lock = threading.Lock()  # guards the queue, the counts and the error
        self._queue: deque[tuple[int, _Task]] = deque()
        self._submitted = self._settled = 0
        self._error: Exception | None = None
        self._closing = False
        self._workers: list[_Worker] = []
        self._failures = self._timeouts = 0
        self._first_timeout = ""
        self._called = os.eventfd(0, os.EFD_NONBLOCK)
        self._control, theirs = Pipe()
        self._forkserver, printed = _start_forkserver(theirs)
        self._output = threading.Thread(target=_copy_output, args=(printed,), daemon=True)
        self._output.start()
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        """The number of responses not graded yet."""
        with self._lock:
            return self._submitted - self._settled

    def submit(self, problem: Problem, responses: Sequence[Response]) -> list[Future[Grade]]:
        """Submit responses to a problem; each future completes, whatever the rewards do.

        A future raises RewardError only where no response can be graded and the stage must stop.
        """
        tasks = [_Task(problem, response, Future()) for response in responses]
        with self._lock:
            for task in tasks:
                if self._error is not None:
                    task.future.set_exception(self._error)
                    continue
                self._queue.append((self._submitted, task))
                self._submitted += 1
        os.eventfd_write(self._called, 1)
        return [task.future for task in tasks]

    def check_failures(self, failures: Sequence[str], samples: int) -> None:
        """Raise RewardError where more than the maximum share of samples have no reward."""
        limit = self._settings.max_failed_fraction
        if len(failures) > limit * samples and (len(failures) > 1 or not limit):
            raise RewardError(
                f"{len(failures)} of {samples} samples have no reward, which exceeds rewards."
                f"max_failed_fraction = {limit:g}; first failure: {failures[0]}"
            )

    def check_timeouts(self, most: int) -> None:
        """Raise RewardError where scoring has timed out `most` times: the rest may take hours."""
        if self._timeouts >= most:
            raise RewardError(
                f"scoring timed out {self._timeouts} times, and the rest is not scored; fix the"
                f" reward, or the rows, or raise its timeout_seconds; first: {self._first_timeout}"
            )

    def close(self) -> None:
        """Kill all processes of the pool; a second call does nothing."""
        if self._closing:
            return
        self._closing = True
        # Shut down, not closed: the pool's thread may be using it. The forkserver then kills all
        # that rewards have started, and exits.
        with socket.socket(fileno=os.dup(self._control.fileno())) as control:
            control.shutdown(socket.SHUT_RDWR)
        with suppress(subprocess.TimeoutExpired):
            self._forkserver.wait(CLOSING_SECONDS if self._workers else 0)
        self._forkserver.kill()  # and the kernel its workers
        self._forkserver.wait()
        self._output.join(PRINTING_SECONDS)
        os.eventfd_write(self._called, 1)
        self._thread.join()
        for worker in self._workers:
            worker.connection.close()
        self._control.close()
        os.close(self._called)

    def _run(self) -> None:
        try:
            self._control.send(self._setup)
            while not self._closing:
                while len(self._workers) < self._size:
                    self._fork()
                self._deal()
                self._listen()
        except Exception as error:
            if not self._closing:
                self._give_up(error)

    def _fork(self) -> None:
        ours, theirs = Pipe()
        shared = os.memfd_create("clock")
        os.ftruncate(shared, CLOCK_BYTES)
        clock = Clock(shared)
        clock.begin(-1, 0, LOADING_SECONDS)
        self._control.send(None)
        send_handle(self._control, theirs.fileno(), self._forkserver.pid)
        send_handle(self._control, shared, self._forkserver.pid)
        process = self._answer()
        # Closed once the forkserver has answered, so that it has received both.
        theirs.close()
        os.close(shared)
        self._workers.append(_Worker(process, ours, clock))

    def _answer(self) -> int:
        """Return the forkserver's answer. Raises RewardError where none comes in time."""
        patience = FORKSERVER_SECONDS if self._workers else LOADING_SECONDS
        if not self._control.poll(patience):
            raise RewardError(f"the rewards' forkserver has not answered for {patience:g} s")
        answer: int = self._control.recv()
        return answer

    def _deal(self) -> None:
        """Send idle workers chunks of the queue, smaller ones as it empties."""
        for worker in [worker for worker in self._workers if worker.loaded and not worker.tasks]:
            with self._lock:
                share = math.ceil(len(self._queue) / (TURNS * self._size))
                taken = [self._queue.popleft() for _ in range(min(share, LONGEST_CHUNK))]
            if not taken:
                return
            worker.tasks = dict(taken)
            # Idle for REST_SECONDS, its clock has run out: `_listen` would take it for overdue.
            worker.clock.rest()
            chunk: Chunk = [
                (n, task.problem, task.response, task.fixed_scores) for n, task in taken
            ]
            with suppress(OSError):  # it has just died, which `_listen` detects
                worker.connection.send(chunk)

    def _listen(self) -> None:
        """Take grades and replace lost workers; wait for submissions or the next look at clocks."""
        busy = any(worker.tasks or not worker.loaded for worker in self._workers)
        connections = {worker.connection: worker for worker in self._workers}
        ready = wait([*connections, self._called], LOOK_SECONDS if busy else None)
        if self._called in ready:
            os.eventfd_read(self._called)
        heard = [
            connections[connection] for connection in ready if isinstance(connection, Connection)
        ]
        for worker in heard:
            if not self._hear(worker):
                self._replace(worker, overdue=False)
        now = time.monotonic()
        working = [worker for worker in self._workers if worker.tasks or not worker.loaded]
        overdue = [worker for worker in working if now > worker.clock.read()[2]]
        for worker in overdue:
            self._replace(worker, overdue=True)
        if heard or overdue:
            self._on_graded()

    def _hear(self, worker: _Worker) -> bool:
        """Handle one message; return False where the worker is gone."""
        try:
            answer: Answer = worker.connection.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            return False
        if isinstance(answer, str):
            raise RewardError(answer)
        worker.loaded = True
        for number, grade in answer or []:
            self._settle(worker.tasks.pop(number), grade)
        return True

    def _replace(self, worker: _Worker, overdue: bool) -> None:
        """Kill a worker, blame its current response, requeue the rest; `_run` forks another."""
        # Killed before its connection is drained: no grade may come for what is requeued below.
        self._control.send(worker.process)
        status = self._answer()
        self._workers.remove(worker)
        while worker.connection.poll() and self._hear(worker):
            pass  # what it had sent counts
        worker.connection.close()
        if not worker.loaded:
            raise RewardError(
                f"a process for rewards {_ending(status)} before it was ready; is rewards."
                f"memory_mebibytes = {self._settings.memory_mebibytes} enough for it?"
            )
        number, reward, deadline = worker.clock.read()
        # A worker killed just as it starts the next response says nothing about either response.
        is_identified = number in worker.tasks and (not overdue or time.monotonic() > deadline)
        if is_identified:
            task = worker.tasks[number]
            # A SIGKILL that the pool did not send may be the kernel's (out of memory) or a
            # person's: the response is to blame only after ATTEMPTS of them.
            killed = not overdue and status == -signal.SIGKILL
            task.attempts += killed
            if not killed or task.attempts >= ATTEMPTS:
                self._blame(number, worker.tasks.pop(number), reward, None if overdue else status)
        for number, task in reversed(worker.tasks.items()):
            task.attempts += not is_identified
            if task.attempts == ATTEMPTS:
                name = " + ".join(self._rewards[task.problem.domain])
                what = f"its process was lost {ATTEMPTS} times"
                line = failure(task.problem, task.response, name, what)
                self._settle(task, Grade(None, {}, failure=line))
            else:
                with self._lock:
                    self._queue.appendleft((number, task))

    def _blame(self, number: int, task: _Task, reward: int, status: int | None) -> None:
        """Settle a response whose reward ended its worker.

        A reward of weight 0 or with a `timed_out` score only requeues it, without that reward.
        """
        name, settings = list(self._rewards[task.problem.domain].items())[reward]
        seconds = settings.timeout_seconds or self._settings.timeout_seconds
        what = f"took more than {seconds:g} seconds and was killed"
        if status is not None:
            what = f"its process {_ending(status)}"
        line = failure(task.problem, task.response, name, what)
        if status is None:
            self._first_timeout = self._first_timeout or line
            self._timeouts += 1
        if not settings.weight:
            task.fixed_scores[name] = None
            task.watch_failures.append(line)
        elif status is None and settings.timed_out is not None:
            task.fixed_scores[name] = settings.timed_out
            self._report(f"{line}; it earns {settings.timed_out:g} (timed_out)")
        else:
            self._settle(task, Grade(None, {}, failure=line))
            return
        task.attempts = 0
        with self._lock:
            self._queue.appendleft((number, task))

    def _settle(self, task: _Task, grade: Grade) -> None:
        if task.watch_failures:
            grade = replace(grade, watch_failures=(*task.watch_failures, *grade.watch_failures))
        for line in grade.watch_failures:
            self._report(f"{line}; its weight is 0, so no sample is dropped")
        if grade.failure is not None:
            self._report(f"{grade.failure}; the sample is dropped")
        # Before the count: where nothing is pending, every future is done.
        task.future.set_result(grade)
        with self._lock:
            self._settled += 1

    def _report(self, line: str) -> None:
        """Report the first failures as notices, the others as lines of the log."""
        self._failures += 1
        if self._failures <= SHOWN_IN_FULL:
            report_notice(line)
        else:
            what, _, outcome = line.rpartition("; ")
            print(f"{what[:SHOWN_CHARACTERS]}; {outcome}", file=sys.stderr, flush=True)

    def _give_up(self, error: Exception) -> None:
        """Fail all futures, present and later ones, with the error."""
        if not isinstance(error, RewardError):
            # A process that is killed closes its connections before it can be waited for.
            with suppress(subprocess.TimeoutExpired):
                self._forkserver.wait(ENDING_SECONDS)
            ended = self._forkserver.returncode
            why = repr(error) if ended is None else f"the forkserver {_ending(ended)}"
            pool_error = RewardError(f"the rewards' processes failed: {why}")
            pool_error.__cause__ = error
            error = pool_error
        with self._lock:
            self._error = error
            waiting = [task for _, task in self._queue]
            self._settled = self._submitted
        for worker in self._workers:
            waiting += worker.tasks.values()
        for task in waiting:
            task.future.set_exception(error)
        self._on_graded()


def _start_forkserver(theirs: Connection) -> tuple[subprocess.Popen[bytes], int]:
    """Return the forkserver and the read end of the pipe with its and its workers' output.

    It searches this process's sys.path, where the user's modules are.
    """
    path = os.pathsep.join(directory or str(Path.cwd()) for directory in sys.path)
    environment = {name: value for name, value in os.environ.items() if name != STATUS_DESCRIPTOR}
    descriptor = theirs.fileno()
    printed, output = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "stages.rewards.forkserver", str(descriptor)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=[descriptor],
        env={**environment, "PYTHONPATH": path},
    )
    os.close(output)
    theirs.close()
    return process, printed


def _copy_output(printed: int) -> None:
    """Copy from a pipe until all writers are gone; report once that output is dropped.

    A reward that prints without end would otherwise fill the disk of the checkpoints.
    """
    left, reported = LARGEST_OUTPUT, False
    with open(printed, "rb", buffering=0) as pipe:
        while piece := pipe.read(PIECE):
            with suppress(OSError):  # a full disk must not stop the rewards
                os.write(ERRORS, piece[:left])
            if len(piece) > left and not reported:
                reported = True
                report_notice(
                    f"the rewards printed more than {LARGEST_OUTPUT} bytes; the rest is not logged:"
                    " make them print less"
                )
            left = max(0, left - len(piece))


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    hint = " (out of memory?)" if -status == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-status).name}{hint}"
