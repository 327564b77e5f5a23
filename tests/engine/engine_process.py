"""A real engine in a separate process group, forked as by the launcher."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

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
    ) -> None:
        self.program = program
        self.address = directory / "address.json"
        self.directory = directory
        self.before_refit: str | None = None  # the refusal to sample
        self._servers = servers
        job = EngineJob(model=model, engine=settings, index=0, address=self.address, seed=0)
        (directory / "engine.json").write_text(job.model_dump_json())
        self.start()

    def start(self) -> None:
        """Start a process; wait until it has written its address or ended."""
        self.address.unlink(missing_ok=True)
        job = str(self.directory / "engine.json")
        command = [sys.executable, "-m", self.program, job]
        log = self.directory / "engine.log"
        self.process = Child("engine", command, log, {}, request_fork=self._servers.of(command))
        deadline = time.monotonic() + START_SECONDS
        try:
            while self.process.status() is None and not self.address.exists():
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
