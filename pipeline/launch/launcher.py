"""The launcher, which runs one job (the ranks of a stage) at a time beside persistent engines.

Engines stay up from stage to stage, and are restarted when they fail; a failed rank ends its job.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path

from parallel.errors import UserError
from parallel.estimates.phases import engine_gpu_bytes
from parallel.files import touch, write_atomically
from parallel.machine.gpus import visible_gpus
from parallel.settings import EngineJob
from pipeline.launch.heartbeats import Heartbeats
from pipeline.launch.placement import Placement, Programs
from pipeline.launch.processes import (
    POLL_SECONDS,
    Process,
    ProcessFailure,
    Signals,
    Stopped,
    kill,
    lost_another,
    wait_for_all,
)
from pipeline.launch.progress import StageView
from pipeline.text import shown
from stages.directory import EngineDirectory, StageDirectory
from stages.settings import RunSettings, StageJob

Work = Generator[None, None, None]  # yields while it waits
Report = Callable[[str], None]

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
        started = settings.engine.started_on(placement.on_gpus)
        self._settings = settings = settings.model_copy(update={"engine": started})
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
            JobFailed: a rank failed or fell silent, or an engine exceeded its restarts.
            Stopped: a stop signal was received; the ranks had time to save.
        """

        def report(notice: str) -> None:
            view.say(notice)
            record(notice)

        self._signals.check()
        addresses = self._engines.addresses
        engines, idle = (addresses, []) if job.samples else ([], addresses)
        reached = {
            "engine_addresses": engines,
            "idle_engines": idle,
            "interface": self._placement.interface,
            "settings": job.settings.model_copy(update={"engine": self._settings.engine}),
        }
        path = write_stage_job(job.model_copy(update=reached))
        view.expect(engines)
        if job.samples:
            self._engines.begin(report)
        heartbeats = Heartbeats(job)
        ranks = self._placement.start_ranks(
            self._programs.stage(path), self._settings.layout.ranks, path.parent, job.samples
        )
        try:
            while not self._finished(job, ranks, report):
                view.poll()
                if silent := heartbeats.failure():
                    raise JobFailed(job.stage, silent)
                if time.monotonic() >= self._next_sign:
                    touch(path)
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
            heartbeats.remove()
            with contextlib.suppress(OSError):  # a full disk is in the error that ended the job
                _report_notices(ranks, report)

    def _finished(self, job: StageJob, ranks: Sequence[Process], report: Report) -> bool:
        """Return whether every rank ended well; restart the engines that failed.

        Raises:
            JobFailed: a rank failed, or an engine that must not be restarted.
        """
        # Engines first: a rank that loses its engine fails too, and can say only that.
        if job.samples and (failure := self._engines.restart_failed(report)):
            raise JobFailed(job.stage, failure)
        if failed_first := _failed(ranks):
            # A rank often fails because another did; the cause may be reported a moment later.
            wait_for_all(ranks, SETTLE_SECONDS)
            if job.samples and (failure := self._engines.failed()):
                raise JobFailed(job.stage, failure)
            raise JobFailed(job.stage, first_cause(_failed(ranks), failed_first))
        return all(rank.status() == 0 for rank in ranks)


def run_to_the_end(work: Work) -> None:
    """Run a job to its end, sleeping whenever it yields."""
    for _ in work:
        time.sleep(POLL_SECONDS)


def first_cause(failed: Sequence[Process], failed_first: Sequence[Process]) -> ProcessFailure:
    """Return the failure that explains the others; `failed_first` failed before the rest.

    A rank that gives its reason comes first, and one that only lost its connection to another
    comes last; a killed rank could report nothing, while those that it brought down could.
    """

    def doubt(rank: Process) -> tuple[bool, bool, bool, bool]:
        failure = rank.failure()
        survived = (rank.status() or 0) >= 0
        return (not failure.stated, lost_another(failure.tail), survived, rank not in failed_first)

    return min(failed, key=doubt).failure()


def _report_notices(ranks: Sequence[Process], report: Report) -> None:
    for rank in ranks:
        for notice in rank.notices():
            report(notice)


def _failed(ranks: Sequence[Process]) -> list[Process]:
    return [rank for rank in ranks if rank.status()]


class EngineSupervisor:
    """The engines of a launcher, in numbered directories; `begin` starts them.

    The members of an engine with `engine.data` of them start together, and where one fails all do:
    the others would wait for it in every step.
    """

    def __init__(
        self,
        directory: Path,
        settings: RunSettings,
        program: Callable[[Path], list[str]],
        placement: Placement,
    ) -> None:
        self._settings = settings
        self._placement = placement
        self._directories = [
            EngineDirectory(directory / member) for member in settings.engine.members
        ]
        self._program = program
        self._engines: list[list[SupervisedEngine]] = []  # the members of each

    @property
    def addresses(self) -> list[Path]:
        """The path of each engine's address."""
        return [directory.address.absolute() for directory in self._directories]

    def begin(self, report: Report) -> None:
        """Start every engine that does not run, and reset the count of restarts.

        Raises:
            UserError: the machine has too few cores for the engines.
        """
        for members in self._engines:
            # Engines outlive a stage, and engine.max_restarts counts the restarts within one.
            members[0].restarts = 0
            if failed := _first_failed(members):
                report(f"{failed[1].cause}; restarting it")
                _restart(members)
        data = self._settings.engine.data
        for start in range(len(self._engines) * data, len(self._directories), data):
            # An earlier launcher's file would send the members to ports where nobody listens.
            self._directories[start].meeting.unlink(missing_ok=True)
            self._engines.append([self._member(index) for index in range(start, start + data)])

    def _member(self, index: int) -> SupervisedEngine:
        """Start the process of this number."""
        directory, engine = self._directories[index], self._settings.engine
        meeting = self._directories[index - index % engine.data].meeting
        job = write_engine_job(directory, self._settings, index, self._placement, meeting)
        command = self._program(job)
        return SupervisedEngine(directory, index, command, self._placement, engine.start_seconds)

    def restart_failed(self, report: Report) -> ProcessFailure | None:
        """Restart the engines that failed; return the failure of one that must not restart."""
        for members in self._engines:
            if (failed := _first_failed(members)) is None:
                continue
            (member, failure), engine = failed, members[0]
            never_started = not member.was_ready and not failure.lost
            if never_started and not (
                engine.restarts == 0 and self._may_start_again(member, failure)
            ):
                return failure  # an engine that never started would fail again
            bound = self._settings.engine.max_restarts
            if engine.restarts >= bound:
                times = "once" if bound == 1 else f"{bound} times"
                ended = (
                    f"it was restarted {times}, the most that engine.max_restarts = {bound} allows"
                )
                refused = "engine.max_restarts = 0 allows no restart"
                return replace(failure, cause=f"{failure.cause}; {ended if bound else refused}")
            engine.restarts += 1
            report(f"{failure.cause}; restarting it ({engine.restarts} of at most {bound})")
            _restart(members)
        return None

    def _may_start_again(self, engine: SupervisedEngine, failure: ProcessFailure) -> bool:
        """Return whether an engine that was never ready gets its one further start, on GPUs.

        Only one that ended and did not say why: on CPUs nothing is transient, and one that says
        why, or was not ready in time, would fail again.
        """
        ended = engine.ended and not failure.stated
        return self._placement.on_gpus and engine.restarts == 0 and ended

    def failed(self) -> ProcessFailure | None:
        """Return the failure of the first engine that has one."""
        failed = next(filter(None, map(_first_failed, self._engines)), None)
        return failed and failed[1]

    def stop(self) -> None:
        """End every engine and everything it started."""
        for members in self._engines:
            for member in members:
                member.stop()


def _first_failed(
    members: Sequence[SupervisedEngine],
) -> tuple[SupervisedEngine, ProcessFailure] | None:
    """Return the member that failed, of several the one that explains the others; None if none."""
    failures = [(member, failure) for member in members if (failure := member.failure())]
    return min(failures, key=lambda pair: lost_another(pair[1].tail), default=None)


def _restart(members: Sequence[SupervisedEngine]) -> None:
    """Start all members again, once none is left that the new ones could meet."""
    for member in members:
        member.stop()
    members[0].directory.meeting.unlink(missing_ok=True)
    for member in members:
        member.start()


class SupervisedEngine:
    """An engine or a member of one, through all its restarts; `was_ready`: it started before."""

    def __init__(
        self,
        directory: EngineDirectory,
        index: int,
        command: list[str],
        placement: Placement,
        start_seconds: float,
    ) -> None:
        self.restarts = 0
        self.was_ready = False
        self.directory = directory
        self._name = f"engine {directory.path.name}"
        self._index = index
        self._command = command
        self._placement = placement
        self._start_seconds = start_seconds
        self._process: Process | None = None
        self._started = 0.0
        self.start()

    def start(self) -> None:
        """Stop the previous process, remove its address and start a new one."""
        self.stop()
        self.directory.address.unlink(missing_ok=True)
        self.directory.restart.unlink(missing_ok=True)
        self._process = self._placement.start_engine(
            self._name, self._index, self._command, self.directory.log
        )
        self._started = time.monotonic()

    def stop(self) -> None:
        """End the process and everything it started."""
        if self._process:
            kill([self._process])
            self._process = None

    @property
    def ended(self) -> bool:
        """True where its process has ended, by itself or killed."""
        return self._process is not None and self._process.status() is not None

    def failure(self) -> ProcessFailure | None:
        """Return why the engine is unusable; None while it is usable.

        It ended, it was not ready in time, or a rank requested its restart.
        """
        if self._process is None:
            return ProcessFailure(f"{self._name} could not be started", self.directory.log)
        ended = self._process.status() is not None
        # Checked after the status: an engine may get ready and end between the two checks.
        ready = self.directory.address.exists()
        self.was_ready = self.was_ready or ready
        if ended:
            failure = self._process.failure()
            prefixed = self.was_ready and failure.stated
            return replace(failure, cause=f"{self._name}: {failure.cause}") if prefixed else failure
        if ready:
            try:
                reason = self.directory.restart.read_text(errors="replace")
            except FileNotFoundError:
                return None
            return ProcessFailure(f"{self._name}: {' '.join(reason.split())}", self.directory.log)
        # While the engine starts, a restart request concerns the process before it.
        self.directory.restart.unlink(missing_ok=True)
        if time.monotonic() < self._started + self._start_seconds:
            return None
        seconds = f"{self._start_seconds} s (engine.start_timeout_seconds)"
        return ProcessFailure(f"{self._name} was not ready after {seconds}", self.directory.log)


def write_stage_job(job: StageJob) -> Path:
    """Write the job into its attempt's directory; return its path."""
    path = StageDirectory(job.directory).job(job.attempt)
    write_atomically(path, job.model_dump_json(indent=2) + "\n")
    return path


def write_engine_job(
    directory: EngineDirectory,
    settings: RunSettings,
    index: int,
    placement: Placement,
    meeting: Path | None = None,
) -> Path:
    """Write the job of one engine, or member of one, with the run's seed; return its path."""
    engine, member = divmod(index, settings.engine.data)
    gpus = visible_gpus() if placement.on_gpus else []  # whatever torch the launcher itself has
    sizes = [gpu.total_bytes for gpu in gpus]
    samplings = [rollout.sampling for rollout in settings.rollouts()]
    samplings += [settings.answer_sampling(name) for name in settings.domains]
    job = EngineJob(
        model=settings.model,
        engine=settings.engine,
        index=engine,
        member=member,
        meeting=meeting.absolute() if meeting and settings.engine.data > 1 else None,
        address=directory.address.absolute(),
        interface=placement.interface,
        nodes=placement.nodes_per_engine,
        seed=settings.seed,
        gpu_memory_bytes=engine_gpu_bytes(settings.layout, settings.engine, sizes),
        deterministic=settings.deterministic,
        sampling_mask=any(sampling.top_k > 0 or sampling.top_p < 1 for sampling in samplings),
    )
    write_atomically(directory.job, job.model_dump_json(indent=2) + "\n")
    return directory.job.absolute()
