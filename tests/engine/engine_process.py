"""A real engine in a separate process group, forked as by the launcher."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from parallel.settings import EngineJob, EngineSettings, ModelSettings
from pipeline.launch.placement import ForkServers
from pipeline.launch.processes import Child
from tests.engine.engine_settings import ENGINE

START_SECONDS = 600
PROGRAM = "parallel.engine.server"
EngineOf = Callable[..., "Running"]  # what the fixture `engine_of` is


class Running:
    """An engine that can be killed and restarted."""

    def __init__(
        self,
        servers: ForkServers,
        model: ModelSettings,
        directory: Path,
        settings: EngineSettings = ENGINE,
        program: str = PROGRAM,
        **of_member: Any,
    ) -> None:
        self.program = program
        self.address = directory / "address.json"
        self.directory = directory
        self.before_refit: str | None = None  # the refusal to sample
        self._servers = servers
        job = EngineJob(
            model=model, engine=settings, index=0, address=self.address, seed=0, **of_member
        )
        (directory / "engine.json").write_text(job.model_dump_json())
        self.start()
        if not of_member:  # members wait for each other
            self.wait()

    def start(self) -> None:
        """Start a process."""
        self.address.unlink(missing_ok=True)
        job = str(self.directory / "engine.json")
        command = [sys.executable, "-m", self.program, job]
        log = self.directory / "engine.log"
        self.process = Child("engine", command, log, {}, request_fork=self._servers.of(command))

    def wait(self, beside: Sequence[Running] = ()) -> None:
        """Wait until the process has written its address or ended; those beside it start too."""
        log = self.directory / "engine.log"
        deadline = time.monotonic() + START_SECONDS
        try:
            while self.process.status() is None and not self.address.exists():
                for other in beside:
                    other.process.status()  # which completes a fork
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Kill all of its processes with SIGKILL."""
        self.process.send(signal.SIGKILL)
        self.process.reap()


@contextmanager
def running_engine(
    servers: ForkServers,
    model: ModelSettings,
    directory: Path,
    settings: EngineSettings = ENGINE,
    program: str = PROGRAM,
) -> Iterator[Running]:
    """Yield an engine that runs inside the context."""
    engine = Running(servers, model, directory, settings, program)
    try:
        yield engine
    finally:
        engine.kill()


@contextmanager
def running_members(
    servers: ForkServers, model: ModelSettings, directory: Path, settings: EngineSettings
) -> Iterator[list[Running]]:
    """Yield the members of an engine that runs inside the context."""
    members: list[Running] = []
    meeting = directory / "members.json"
    try:
        for member in range(settings.data):
            own = directory / f"0.{member}"
            own.mkdir()
            of_member = {"member": member, "meeting": meeting}
            members.append(Running(servers, model, own, settings, **of_member))
        for each in members:
            each.wait(members)
        yield members
    finally:
        for each in members:
            each.kill()
