"""The launcher, which runs one job (the ranks of a stage) at a time beside persistent engines."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel.errors import UserError
from parallel.files import write_atomically
from pipeline.launch.engines import EngineSupervisor, Report
from pipeline.launch.placement import Placement
from pipeline.launch.processes import (
    POLL_SECONDS,
    Process,
    ProcessFailure,
    Signals,
    Stopped,
    kill,
    lost_another,
    python_module,
    wait_for_all,
)
from pipeline.launch.progress import StageView
from pipeline.run.directory import RunDirectory, StageDirectory
from pipeline.text import shown
from stages.settings import RunSettings, StageJob

Work = Generator[None, None, None]  # yields while it waits

SAVE_SECONDS = 30.0  # for the checkpoint of a stage that is asked to stop; a person may be waiting
SETTLE_SECONDS = 1.0  # for the other ranks to report, after one failed
SIGN_SECONDS = 1.0  # between touches of the job's file, which date the end of a killed attempt


class JobFailed(UserError):
    """A rank failed, or an engine that a restart does not help."""

    def __init__(self, stage: str, failure: ProcessFailure) -> None:
        tail = [f"    | {line}" for line in failure.tail]
        lines = [f"stage {stage} failed: {failure.cause}", f"  log: {shown(failure.log)}", *tail]
        super().__init__("\n".join(lines))
        self.failure = failure


@dataclass(frozen=True)
class Programs:
    """The commands of a stage's rank and of an engine, each from the path of its job."""

    stage: Callable[[Path], list[str]] = lambda job: python_module("stages.main", job)
    engine: Callable[[Path], list[str]] = lambda job: python_module("parallel.engine.server", job)


class Launcher:
    """A context in which jobs run; leaving it ends everything it started."""

    def __init__(
        self,
        engines: Path,
        settings: RunSettings,
        programs: Programs,
        placement: Placement,
        signals: Signals,
        save_seconds: float = SAVE_SECONDS,
    ) -> None:
        self._settings = settings
        self._programs = programs
        self._placement = placement
        self._signals = signals
        self._save_seconds = save_seconds
        self._engines = EngineSupervisor(engines, settings, programs.engine, placement)
        self._next_sign = 0.0

    def __enter__(self) -> Launcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._engines.stop()

    def check(self) -> None:
        """Raise Stopped if a stop signal was received."""
        self._signals.check()

    def execute(
        self, job: StageJob, view: StageView, record: Callable[[str], None] = lambda _: None
    ) -> Work:
        """Run a job to its end, yielding while it waits.

        All ranks have ended when this returns, raises or is closed. Notices of the ranks and
        restarts of engines are shown and passed to `record`.

        Raises:
            JobFailed: a rank failed, or an engine exceeded its restarts.
            Stopped: a stop signal was received; the ranks had time to save.
        """

        def report(notice: str) -> None:
            view.say(notice)
            record(notice)

        self._signals.check()
        engines = self._engines.addresses if job.samples else []
        reached = {"engine_addresses": engines, "interface": self._placement.interface}
        path = write_stage_job(job.model_copy(update=reached))
        view.expect(engines)
        if job.samples:
            self._engines.begin(report)
        ranks = self._placement.start_ranks(
            self._programs.stage(path), self._settings.layout.ranks, path.parent, job.samples
        )
        try:
            while not self._finished(job, ranks, report):
                view.poll()
                if time.monotonic() >= self._next_sign:
                    path.touch()
                    self._next_sign = time.monotonic() + SIGN_SECONDS
                _report_notices(ranks, report)
                self._signals.check()
                yield
        except Stopped as stopped:
            for rank in ranks:  # a stage then saves a checkpoint
                rank.send(signal.SIGTERM)
            view.say("saving a checkpoint before exiting; send the signal again to stop now")
            received = self._signals.count(stopped.number)
            deadline = time.monotonic() + self._save_seconds
            while any(rank.status() is None for rank in ranks) and time.monotonic() <= deadline:
                if self._signals.count(stopped.number) > received:
                    break
                yield
            self._signals.check()
            raise
        finally:
            kill(ranks)
            with contextlib.suppress(OSError):  # a full disk is in the error that ended the job
                _report_notices(ranks, report)

    def _finished(self, job: StageJob, ranks: Sequence[Process], report: Report) -> bool:
        """Return whether every rank ended well; restart the engines that failed.

        Raises:
            JobFailed: a rank failed, or an engine that must not be restarted.
        """
        if job.samples and (failure := self._engines.restart_failed(report)):
            raise JobFailed(job.stage, failure)
        if first := _failed(ranks):
            wait_for_all(ranks, SETTLE_SECONDS)
            if job.samples and (failure := self._engines.failed()):
                raise JobFailed(job.stage, failure)
            raise JobFailed(job.stage, first_cause(_failed(ranks), first))
        return all(rank.status() == 0 for rank in ranks)


def run_to_the_end(work: Work) -> None:
    """Run a job to its end, sleeping whenever it yields."""
    for _ in work:
        time.sleep(POLL_SECONDS)


def first_cause(failed: Sequence[Process], first: Sequence[Process]) -> ProcessFailure:
    """Return the failure that explains the others; `first` are the ranks that failed first.

    A rank that gives its reason comes first, and one that only lost its connection to another
    comes last; a killed rank could report nothing, while those that it brought down could.
    """

    def doubt(rank: Process) -> tuple[bool, bool, bool, bool]:
        failure = rank.failure()
        survived = (rank.status() or 0) >= 0
        return (not failure.stated, lost_another(failure.tail), survived, rank not in first)

    return min(failed, key=doubt).failure()


def _report_notices(ranks: Sequence[Process], report: Report) -> None:
    for rank in ranks:
        for notice in rank.notices():
            report(notice)


def _failed(ranks: Sequence[Process]) -> list[Process]:
    return [rank for rank in ranks if rank.status()]


def engine_directories(run: RunDirectory, count: int) -> list[Path]:
    """Return the engines' directory of each of `count` slots."""
    if count == 1:
        return [run.engines]
    return [run.engines / f"slot_{slot}" for slot in range(count)]


def checkpoint_path(run: RunDirectory, stage: str, step: int | None = None) -> Path:
    """Return the path of a stage's newest whole checkpoint, or of its checkpoint of a step.

    Raises:
        UserError: the stage has none, or none of that step.
    """
    directory = run.stage(stage)
    found = directory.newest_checkpoint() if step is None else directory.checkpoint(step)
    if found is not None:
        return found.path.absolute()
    message = f"stage {stage} of {shown(run.path)} has no checkpoint"
    if not (steps := [each.step for each in directory.whole_checkpoints()]):
        raise UserError(f"{message} yet")
    kept = ", ".join(map(str, steps))
    raise UserError(f"{message} of step {step}: it has step{'s' * (len(steps) > 1)} {kept}")


def write_stage_job(job: StageJob) -> Path:
    """Write the job into its attempt's directory; return its path."""
    path = StageDirectory(job.directory).job(job.attempt)
    write_atomically(path, job.model_dump_json(indent=2) + "\n")
    return path
