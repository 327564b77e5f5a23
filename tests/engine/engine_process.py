"""A real engine in a process group of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from engine_settings import ENGINE

from parallel.settings import EngineJob, EngineSettings, ModelSettings

EngineOf = Callable[..., "Running"]  # what the fixture `engine_of` is


class Running:
    """An engine that can be killed and started anew, as the launcher would do it."""

    def __init__(self, model: ModelSettings, directory: Path, settings: EngineSettings) -> None:
        self.address = directory / "address.json"
        self.directory = directory
        self.before_refit: str | None = None  # why it did not sample then
        job = EngineJob(model=model, engine=settings, index=0, address=self.address, seed=0)
        (directory / "engine.json").write_text(job.model_dump_json())
        self.start()

    def start(self) -> None:
        """Start a process, which writes the address when it is ready."""
        self.address.unlink(missing_ok=True)
        with (self.directory / "engine.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "parallel.rollout.server", self.directory / "engine.json"],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self) -> None:
        """kill -9 of all its processes."""
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def running_engine(
    model: ModelSettings, directory: Path, settings: EngineSettings = ENGINE
) -> Iterator[Running]:
    """An engine that runs as long as it is needed."""
    engine = Running(model, directory, settings)
    try:
        yield engine
    finally:
        engine.kill()
