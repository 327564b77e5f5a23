"""Runs one job at a time on this machine: the ranks of a stage, beside engines that stay up."""

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
from pipeline.cores import share_out
from pipeline.engines import Engines, Tell
from pipeline.errors import BraidError
from pipeline.jobs import write_stage_job
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
    """A rank failed, or an engine for which a restart is no remedy."""

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
    """The command lines of a stage's rank and of an engine, each from the path of its job."""

    stage: Callable[[Path], list[str]] = lambda job: python_module("stages.main", job)
    engine: Callable[[Path], list[str]] = lambda job: python_module("parallel.rollout.server", job)


class Launcher:
    """Context in which jobs run; on leaving it nothing it started is left running."""

    def __init__(self, run: RunDirectory, settings: RunSettings, programs: Programs) -> None:
        self._settings = settings
        self._programs = programs
        self._engines = Engines(run, settings, programs.engine)
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
        self._engines.stop()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def execute(
        self, job: StageJob, view: StageView, record: Callable[[str], None] = lambda _: None
    ) -> None:
        """Run a job to its end; nothing of it runs any more when this returns or raises.

        What a rank wants known meanwhile, and every restart of an engine, is shown and handed to
        `record`.

        Raises:
            JobFailed: a rank ended badly, or an engine more often than it may be restarted.
            Stopped: a signal asked for it; the ranks had time to save.
        """

        def tell(notice: str) -> None:
            view.say(notice)
            record(notice)

        self._check_signal()
        path = write_stage_job(job)
        view.expect(job.engine_addresses)
        if job.engine_addresses:
            self._engines.begin(tell)
        ranks = self._start_ranks(job, path)
        try:
            while not self._finished(job, ranks, tell):
                view.poll()
                self._show_life(path)
                _pass_on(ranks, tell)
                self._check_signal()
                time.sleep(POLL_SECONDS)
        except Stopped:
            view.say("stopping when the stage has saved; the same signal again stops at once")
            self._let_save(ranks)
            raise
        finally:
            kill(ranks)
            with contextlib.suppress(OSError):  # a full disk is told by what ended the job
                _pass_on(ranks, tell)

    def _start_ranks(self, job: StageJob, path: Path) -> list[Child]:
        world = self._settings.layout.ranks
        common = {
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "OMP_NUM_THREADS": "1",
        }
        # Beside engines that have nothing to do, the ranks may use every core.
        cores = share_out(self._settings.engine).ranks if job.engine_addresses else None
        ranks: list[Child] = []
        try:
            for rank in range(world):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                log = path.parent / f"rank_{rank}.log"
                command = self._programs.stage(path)
                ranks.append(Child(f"rank {rank}", command, log, {**common, **own}, cores))
        except OSError:
            kill(ranks)
            raise
        return ranks

    def _finished(self, job: StageJob, ranks: list[Child], tell: Tell) -> bool:
        """Whether every rank ended well; restarts the engines that need it.

        Raises:
            JobFailed: a rank ended otherwise, or a restart is no remedy.
        """
        if job.engine_addresses and (failure := self._engines.mend(tell)):
            raise JobFailed(job.stage, failure)
        if first := _failed(ranks):
            wait_for_all(ranks, SETTLE_SECONDS)
            if job.engine_addresses and (failure := self._engines.failed()):
                raise JobFailed(job.stage, failure)
            raise JobFailed(job.stage, first_cause(_failed(ranks), first))
        return all(rank.status() == 0 for rank in ranks)

    def _let_save(self, ranks: list[Child]) -> None:
        received = len(self._received)
        ask_to_stop(ranks)
        wait_for_all(ranks, SAVE_SECONDS, cut_short=lambda: len(self._received) > received)

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


def _pass_on(ranks: list[Child], tell: Tell) -> None:
    for rank in ranks:
        for notice in rank.notices():
            tell(notice)


def _failed(ranks: list[Child]) -> list[Child]:
    return [rank for rank in ranks if rank.status()]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
