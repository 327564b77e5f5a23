"""The launcher, which runs one job (the ranks of a stage) at a time beside persistent engines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from parallel.files import write_atomically
from pipeline.errors import BraidError
from pipeline.launch.engines import EngineSupervisor, Report
from pipeline.launch.placement import Placement
from pipeline.launch.processes import (
    POLL_SECONDS,
    Process,
    ProcessFailure,
    Signals,
    Stopped,
    ask_to_stop,
    kill,
    lost_another,
    python_module,
    wait_for_all,
)
from pipeline.launch.progress import StageView
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import Stage, gate_of
from pipeline.run.run import Run
from pipeline.text import shown
from stages.directory import StageDirectory
from stages.settings import RunSettings, StageJob

Work = Generator[None, None, None]  # yields while it waits

SAVE_SECONDS = 30.0  # for the checkpoint of a stage that is asked to stop
SETTLE_SECONDS = 1.0  # for the other ranks to report, after one failed
SIGN_SECONDS = 1.0  # between touches of the job's file, which date the end of a killed attempt


class MissingCheckpoint(BraidError):
    """A stage has no checkpoint that another stage needs."""


class JobFailed(BraidError):
    """A rank failed, or an engine that a restart does not help."""

    def __init__(self, stage: str, failure: ProcessFailure) -> None:
        tail = [f"    | {line}" for line in failure.tail]
        lines = [f"stage {stage} failed: {failure.cause}", f"  log: {shown(failure.log)}", *tail]
        super().__init__("\n".join(lines))
        self.failure = failure

    @property
    def cause(self) -> str:
        """The cause in one line."""
        return self.failure.cause


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
                self._show_life(path)
                _report_notices(ranks, report)
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


def stage_job(run: Run, stage: Stage, attempt: int) -> StageJob:
    """Return the job of one attempt at a stage; a launcher adds the addresses of its engines."""
    directory, settings = run.stage(stage.name), run.settings
    if stage.kind == "gate":
        asked = {"problems": gate_of(stage, settings).problems, "samples_per_problem": 1}
        evaluation = settings.evaluation.model_copy(update=asked)
        settings = settings.model_copy(update={"evaluation": evaluation})
    return StageJob(
        stage=stage.name,
        kind=stage.kind,
        domain=stage.domain,
        directory=directory.path.absolute(),
        attempt=attempt,
        parent=checkpoint_path(run, stage.parent) if stage.parent else None,
        teachers={key: checkpoint_path(run, name) for key, name in stage.teachers.items()},
        models={key: checkpoint_path(run, name) for key, name in stage.models.items()},
        evaluated_on=stage.evaluated_on,
        output=directory.exported.absolute() if stage.kind == "export" else None,
        samples=stage.needs_engine,
        settings=settings,
    )


def checkpoint_path(run: RunDirectory, stage: str, step: int | None = None) -> Path:
    """Return the path of a stage's newest whole checkpoint, or of its checkpoint of a step.

    Raises:
        MissingCheckpoint: the stage has none, or none of that step.
    """
    directory = run.stage(stage)
    found = directory.newest_checkpoint() if step is None else directory.checkpoint(step)
    if found is not None:
        return found.path.absolute()
    message = f"stage {stage} of {shown(run.path)} has no checkpoint"
    if not (steps := [each.step for each in directory.whole_checkpoints()]):
        raise MissingCheckpoint(f"{message} yet")
    kept = ", ".join(map(str, steps))
    raise MissingCheckpoint(f"{message} of step {step}: it has step{'s' * (len(steps) > 1)} {kept}")


def write_stage_job(job: StageJob) -> Path:
    """Write the job into its attempt's directory; return its path."""
    path = StageDirectory(job.directory).job(job.attempt)
    write_atomically(path, job.model_dump_json(indent=2) + "\n")
    return path
