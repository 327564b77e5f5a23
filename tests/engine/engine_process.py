"""A real engine in a separate process group, forked as by the launcher."""

from __future__ import annotations

import importlib
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from parallel.settings import EngineJob, EngineSettings, ModelSettings
from pipeline.launch.placement import ForkServers
from pipeline.launch.processes import Child
from tests.awaiting import wait_until
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
            model=model,
            engine=settings,
            index=0,
            address=self.address,
            seed=0,
            sampling_mask=True,
            **of_member,
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
        request_fork = forked_program(self._servers, self.program)
        self.process = Child("engine", command, log, {}, request_fork=request_fork)

    def wait(self, beside: Sequence[Running] = ()) -> None:
        """Wait until the process has written its address; those beside it start too.

        Raises:
            AssertionError: it has ended, or one beside it that it would wait for; with the log.
        """
        log = self.directory / "engine.log"
        deadline = time.monotonic() + START_SECONDS
        try:
            while not self.address.exists():
                for engine in (self, *beside):  # `status` also completes a fork
                    ended = engine.process.status() is not None and not engine.address.exists()
                    assert not ended, (engine.directory / "engine.log").read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Kill all of its processes with SIGKILL."""
        self.process.send(signal.SIGKILL)
        self.process.reap()


def forked_program(servers: ForkServers, program: str) -> Callable[..., Any] | None:
    """Return a request of the engines' fork server to run a program of the tests.

    A program that is an engine with a patch needs no second server, nor an import of vLLM.
    """
    usual: Any = servers.of([sys.executable, "-m", PROGRAM])
    if usual is None or program == PROGRAM:
        return usual

    def request_fork(*arguments: Any) -> Any:
        with mock.patch.object(usual.__self__, "_module", program):
            return usual(*arguments)

    return request_fork


def call(servers: ForkServers, function: Callable[..., Any], directory: Path, *given: str) -> Any:
    """Return what a test module's function returns in a process with vLLM, forked if possible.

    Raises:
        AssertionError: the process failed; with its log.
    """
    answer, log = directory / "answer.pickle", directory / "call.log"
    name = function.__module__, function.__qualname__
    command = [sys.executable, "-m", __name__, *name, str(answer), *given]
    process = Child("call", command, log, {}, request_fork=forked_program(servers, __name__))
    try:
        wait_until(lambda: process.status() is not None)
        assert process.status() == 0, log.read_text()
    finally:
        process.reap()
    return pickle.loads(answer.read_bytes())


def main() -> None:
    """Run the function of a `call`, with argv MODULE FUNCTION ANSWER ARGUMENT ..."""
    module, function, answer, *given = sys.argv[1:]
    found = getattr(importlib.import_module(module), function)(*given)
    Path(answer).write_bytes(pickle.dumps(found))


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


if __name__ == "__main__":
    main()
