"""Runs one job at a time on this machine: the ranks of a stage, beside an engine that stays up."""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from parallel.settings import LOST_PEER
from pipeline.errors import BraidError
from pipeline.jobs import engine_address, write_engine_job, write_stage_job
from pipeline.processes import (
    POLL_SECONDS,
    Child,
    Failure,
    ask_to_stop,
    kill,
    python_module,
    wait_for_all,
)
from pipeline.progress import StageView
from pipeline.run_directory import RunDirectory
from pipeline.violations import shown
from stages.settings import RunSettings, StageJob

SAVE_SECONDS = 30.0  # what a stage that is asked to stop may take for its checkpoint
SETTLE_SECONDS = 1.0  # what the other ranks of a failed one may take to say what they saw
SIGN_SECONDS = 1.0  # how often the job's file is touched, to tell later how long a killed run ran
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class JobFailed(BraidError):
    """A rank or the engine failed."""

    def __init__(self, stage: str, failure: Failure) -> None:
        tail = [f"    | {line}" for line in failure.tail]
        lines = [f"stage {stage} failed: {failure.cause}", f"  log: {shown(failure.log)}", *tail]
        super().__init__("\n".join(lines))
        self.cause = failure.cause


class Stopped(BraidError):
    """A signal asked the launcher to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


@dataclass(frozen=True)
class Programs:
    """The command lines of a stage's rank and of the engine, each from the path of its job."""

    stage: Callable[[Path], list[str]] = lambda job: python_module("stages.main", job)
    engine: Callable[[Path], list[str]] = lambda job: python_module("parallel.rollout.server", job)


class Launcher:
    """Context in which jobs run; on leaving it nothing it started is left running."""

    def __init__(self, run: RunDirectory, settings: RunSettings, programs: Programs) -> None:
        self._run = run
        self._settings = settings
        self._programs = programs
        self._engine: Child | None = None
        self._received: list[int] = []
        self._next_sign = 0.0
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Launcher:
        for number in STOP_SIGNALS:
            self._handlers[number] = signal.signal(number, self._note_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._engine:
            kill([self._engine])
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def execute(
        self, job: StageJob, view: StageView, record: Callable[[str], None] = lambda _: None
    ) -> None:
        """Run a job to its end; nothing of it runs any more when this returns or raises.

        What a rank wants known meanwhile is shown and handed to `record`.

        Raises:
            JobFailed: a rank or the engine ended badly.
            Stopped: a signal asked for it; the ranks had time to save.
        """
        self._check_signal()
        path = write_stage_job(job)
        if job.engine_address and self._engine is None:
            self._start_engine()
        ranks = self._start_ranks(path)
        try:
            while not self._finished(job.stage, ranks):
                view.poll()
                self._show_life(path)
                _pass_on(ranks, view, record)
                self._check_signal()
                time.sleep(POLL_SECONDS)
        except Stopped:
            view.say("stopping when the stage has saved; the same signal again stops at once")
            self._let_save(ranks)
            raise
        finally:
            kill(ranks)
            with contextlib.suppress(OSError):  # a full disk is told by what ended the job
                _pass_on(ranks, view, record)

    def _start_engine(self) -> None:
        engine_address(self._run).unlink(missing_ok=True)
        command = self._programs.engine(write_engine_job(self._run, self._settings))
        self._engine = Child("the engine", command, self._run.engine / "engine.log", {})

    def _start_ranks(self, job: Path) -> list[Child]:
        world = self._settings.layout.ranks
        common = {
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "OMP_NUM_THREADS": "1",
        }
        ranks: list[Child] = []
        try:
            for rank in range(world):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                log = job.parent / f"rank_{rank}.log"
                command = self._programs.stage(job)
                ranks.append(Child(f"rank {rank}", command, log, {**common, **own}))
        except OSError:
            kill(ranks)
            raise
        return ranks

    def _finished(self, stage: str, ranks: list[Child]) -> bool:
        """Whether every rank ended well.

        Raises:
            JobFailed: the engine or a rank ended otherwise.
        """
        self._check_engine(stage)
        if first := _failed(ranks):
            wait_for_all(ranks, SETTLE_SECONDS)
            self._check_engine(stage)
            raise JobFailed(stage, first_cause(_failed(ranks), first))
        return all(rank.status() == 0 for rank in ranks)

    def _let_save(self, ranks: list[Child]) -> None:
        received = len(self._received)
        ask_to_stop(ranks)
        wait_for_all(ranks, SAVE_SECONDS, cut_short=lambda: len(self._received) > received)

    def _check_engine(self, stage: str) -> None:
        if self._engine and self._engine.status() is not None:
            raise JobFailed(stage, self._engine.failure())

    def _show_life(self, job: Path) -> None:
        if time.monotonic() >= self._next_sign:
            job.touch()
            self._next_sign = time.monotonic() + SIGN_SECONDS

    def _check_signal(self) -> None:
        if self._received:
            raise Stopped(self._received[0])

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        # Only noted: an exception from here could fall between starting a process and
        # remembering it.
        self._received.append(number)


def first_cause(failed: list[Child], first: list[Child]) -> Failure:
    """The failure that explains the others; `first` holds the ranks that failed before the rest.

    A rank that gives its reason knows best. One that only lost its connection to another is the
    last to ask; a killed rank had no time to say anything, and pulled down others that had.
    """

    def doubt(rank: Child) -> tuple[bool, bool, bool, bool]:
        failure = rank.failure()
        lost_another = any(LOST_PEER in line for line in failure.tail)
        survived = (rank.status() or 0) >= 0
        return (not failure.stated, lost_another, survived, rank not in first)

    return min(failed, key=doubt).failure()


def _pass_on(ranks: list[Child], view: StageView, record: Callable[[str], None]) -> None:
    for rank in ranks:
        for notice in rank.notices():
            view.say(notice)
            record(notice)


def _failed(ranks: list[Child]) -> list[Child]:
    return [rank for rank in ranks if rank.status()]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
