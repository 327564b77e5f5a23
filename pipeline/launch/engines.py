"""The engine processes, which stay up from stage to stage and are restarted when they fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from parallel.files import write_atomically
from parallel.settings import EngineJob
from pipeline.launch.placement import Placement
from pipeline.launch.processes import Process, ProcessFailure, kill
from stages.directory import EngineDirectory
from stages.settings import RunSettings

Report = Callable[[str], None]


class EngineSupervisor:
    """The engines of a launcher, in numbered directories; `begin` starts them."""

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
            EngineDirectory(directory / str(index)) for index in range(settings.engine.count)
        ]
        self._program = program
        self._engines: list[SupervisedEngine] = []

    @property
    def addresses(self) -> list[Path]:
        """The path of each engine's address."""
        return [directory.address.absolute() for directory in self._directories]

    def begin(self, report: Report) -> None:
        """Start every engine that does not run, and reset the count of restarts.

        Raises:
            UserError: the machine has too few cores for the engines.
        """
        if not self._engines:
            patience = self._settings.engine.start_timeout_seconds
            for index, directory in enumerate(self._directories):
                job = write_engine_job(directory, self._settings, index, self._placement.interface)
                command = self._program(job)
                self._engines.append(
                    SupervisedEngine(directory, index, command, self._placement, patience)
                )
            return
        for engine in self._engines:
            engine.restarts = 0
            if failure := engine.failure():
                report(f"{failure.cause}; restarting it")
                engine.start()

    def restart_failed(self, report: Report) -> ProcessFailure | None:
        """Restart the engines that failed; return the failure of one that must not restart."""
        for engine in self._engines:
            if (failure := engine.failure()) is None:
                continue
            if not engine.was_ready and not failure.lost:
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
            engine.start()
        return None

    def failed(self) -> ProcessFailure | None:
        """Return the failure of the first engine that has one."""
        return next(filter(None, (engine.failure() for engine in self._engines)), None)

    def stop(self) -> None:
        """End every engine and everything it started."""
        for engine in self._engines:
            engine.stop()


class SupervisedEngine:
    """An engine through all its restarts; `was_ready` means that it has started before."""

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
        self._name = f"engine {index}"
        self._index = index
        self._directory = directory
        self._command = command
        self._placement = placement
        self._start_seconds = start_seconds
        self._process: Process | None = None
        self._started = 0.0
        self.start()

    def start(self) -> None:
        """Stop the previous process, remove its address and start a new one."""
        self.stop()
        self._directory.address.unlink(missing_ok=True)
        self._directory.restart.unlink(missing_ok=True)
        self._process = self._placement.start_engine(
            self._name, self._index, self._command, self._directory.log
        )
        self._started = time.monotonic()

    def stop(self) -> None:
        """End the process and everything it started."""
        if self._process:
            kill([self._process])
            self._process = None

    def failure(self) -> ProcessFailure | None:
        """Return why the engine is unusable; None while it is usable.

        It ended, it was not ready in time, or a rank requested its restart.
        """
        assert self._process is not None
        ended = self._process.status() is not None
        # Checked after the status: an engine may get ready and end between the two checks.
        ready = self._directory.address.exists()
        self.was_ready = self.was_ready or ready
        if ended:
            failure = self._process.failure()
            named = self.was_ready and failure.stated
            return replace(failure, cause=f"{self._name}: {failure.cause}") if named else failure
        if ready:
            try:
                reason = self._directory.restart.read_text(errors="replace")
            except FileNotFoundError:
                return None
            return ProcessFailure(f"{self._name}: {' '.join(reason.split())}", self._directory.log)
        # While the engine starts, a restart request concerns the process before it.
        self._directory.restart.unlink(missing_ok=True)
        if time.monotonic() < self._started + self._start_seconds:
            return None
        seconds = f"{self._start_seconds} s (engine.start_timeout_seconds)"
        return ProcessFailure(f"{self._name} was not ready after {seconds}", self._directory.log)


def write_engine_job(
    directory: EngineDirectory, settings: RunSettings, index: int, interface: str
) -> Path:
    """Write one engine's job, with the run's seed; return its path."""
    job = EngineJob(
        model=settings.model,
        engine=settings.engine,
        index=index,
        address=directory.address.absolute(),
        interface=interface,
        seed=settings.seed,
    )
    write_atomically(directory.job, job.model_dump_json(indent=2) + "\n")
    return directory.job.absolute()
