"""Runs one job at a time: the ranks of a stage, beside engines that stay up from job to job."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from pipeline.config.violations import shown
from pipeline.errors import BraidError
from pipeline.launch.engines import EngineSupervisor, Tell
from pipeline.launch.jobs import write_stage_job
from pipeline.launch.placement import Placement
from pipeline.launch.processes import (
    POLL_SECONDS,
    Process,
    ProcessFailure,
    ask_to_stop,
    kill,
    lost_another,
    python_module,
    wait_for_all,
)
from pipeline.launch.progress import StageView
from pipeline.launch.signals import Signals, Stopped
from stages.settings import RunSettings, StageJob

Work = Generator[None, None, None]  # what yields whenever there is nothing to do but wait

SAVE_SECONDS = 30.0  # what a stage that is asked to stop may take for its checkpoint
SETTLE_SECONDS = 1.0  # what the other ranks of a failed one may take to say what they saw
SIGN_SECONDS = 1.0  # how often the job's file is touched, to tell later how long a killed run ran


class JobFailed(BraidError):
    """A rank failed, or an engine for which a restart is no remedy."""

    def __init__(self, stage: str, failure: ProcessFailure) -> None:
        tail = [f"    | {line}" for line in failure.tail]
        lines = [f"stage {stage} failed: {failure.cause}", f"  log: {shown(failure.log)}", *tail]
        super().__init__("\n".join(lines))
        self.failure = failure

    @property
    def cause(self) -> str:
        """In one line."""
        return self.failure.cause


@dataclass(frozen=True)
class Programs:
    """The command lines of a stage's rank and of an engine, each from the path of its job."""

    stage: Callable[[Path], list[str]] = lambda job: python_module("stages.main", job)
    engine: Callable[[Path], list[str]] = lambda job: python_module("parallel.engine.server", job)


class Launcher:
    """Context in which jobs run; on leaving it nothing it started is left running."""

    def __init__(
        self,
        engines: Path,
        settings: RunSettings,
        programs: Programs,
        placement: Placement,
        signals: Signals,
        save_seconds: float = SAVE_SECONDS,
    ) -> None:
        """`engines` is the folder for the engines' own folders."""
        self._settings = settings
        self._programs = programs
        self._placement = placement
        self._signals = signals
        self._save_seconds = save_seconds
        self._engines = EngineSupervisor(engines, settings, programs.engine, placement)
        self._next_sign = 0.0

    def __enter__(self) -> Launcher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._engines.stop()

    def check(self) -> None:
        """Raises Stopped when a signal asked for it."""
        self._signals.check()

    def execute(
        self, job: StageJob, view: StageView, record: Callable[[str], None] = lambda _: None
    ) -> Work:
        """Run a job to its end, yielding whenever there is nothing to do but wait; nothing of it
        runs any more when this returns, raises or is closed.

        What a rank wants known meanwhile, and every restart of an engine, is shown and handed to
        `record`.

        Raises:
            JobFailed: a rank ended badly, or an engine more often than it may be restarted.
            Stopped: a signal asked for it; the ranks had time to save.
        """

        def tell(notice: str) -> None:
            view.say(notice)
            record(notice)

        self._signals.check()
        engines = self._engines.addresses if job.samples else []
        reached = {"engine_addresses": engines, "interface": self._placement.interface}
        path = write_stage_job(job.model_copy(update=reached))
        view.expect(engines)
        if job.samples:
            self._engines.begin(tell)
        ranks = self._placement.start_ranks(
            self._programs.stage(path), self._settings.layout.ranks, path.parent, job.samples
        )
        try:
            while not self._finished(job, ranks, tell):
                view.poll()
                self._show_life(path)
                _pass_on(ranks, tell)
                self._signals.check()
                yield
        except Stopped as stopped:
            ask_to_stop(ranks)
            view.say("saving a checkpoint before exiting; send the signal again to stop now")
            yield from self._let_save(ranks, stopped)
            self._signals.check()
            raise
        finally:
            kill(ranks)
            with contextlib.suppress(OSError):  # a full disk is told by what ended the job
                _pass_on(ranks, tell)

    def _finished(self, job: StageJob, ranks: Sequence[Process], tell: Tell) -> bool:
        """Whether every rank ended well; restarts the engines that need it.

        Raises:
            JobFailed: a rank ended otherwise, or a restart is no remedy.
        """
        if job.samples and (failure := self._engines.mend(tell)):
            raise JobFailed(job.stage, failure)
        if first := _failed(ranks):
            wait_for_all(ranks, SETTLE_SECONDS)
            if job.samples and (failure := self._engines.failed()):
                raise JobFailed(job.stage, failure)
            raise JobFailed(job.stage, first_cause(_failed(ranks), first))
        return all(rank.status() == 0 for rank in ranks)

    def _let_save(self, ranks: Sequence[Process], stopped: Stopped) -> Iterator[None]:
        received = self._signals.count(stopped.number)
        deadline = time.monotonic() + self._save_seconds
        while any(rank.status() is None for rank in ranks):
            if time.monotonic() > deadline or self._signals.count(stopped.number) > received:
                return
            yield

    def _show_life(self, job: Path) -> None:
        if time.monotonic() >= self._next_sign:
            job.touch()
            self._next_sign = time.monotonic() + SIGN_SECONDS


def to_the_end(work: Work) -> None:
    """Go through what yields when it has to wait, with nothing else to do meanwhile."""
    for _ in work:
        time.sleep(POLL_SECONDS)


def first_cause(failed: Sequence[Process], first: Sequence[Process]) -> ProcessFailure:
    """The failure that explains the others; `first` holds the ranks that failed before the rest.

    A rank that gives its reason knows best. One that only lost its connection to another is the
    last to ask; a killed rank had no time to say anything, and pulled down others that had.
    """

    def doubt(rank: Process) -> tuple[bool, bool, bool, bool]:
        failure = rank.failure()
        survived = (rank.status() or 0) >= 0
        return (not failure.stated, lost_another(failure.tail), survived, rank not in first)

    return min(failed, key=doubt).failure()


def _pass_on(ranks: Sequence[Process], tell: Tell) -> None:
    for rank in ranks:
        for notice in rank.notices():
            tell(notice)


def _failed(ranks: Sequence[Process]) -> list[Process]:
    return [rank for rank in ranks if rank.status()]
