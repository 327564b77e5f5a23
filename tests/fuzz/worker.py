"""A process that runs fuzz cases under a memory limit, and the watchdog that kills stuck ones.

A case is a generator of steps. A step that does not end in time is a failure like a traceback: the
process is killed, a new one is forked, and the next case runs.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import re
import resource
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

STEP_SECONDS = 5.0  # of CPU time: this machine may be busy
BLOCKED_SECONDS = 20.0  # in state S: a step that waits for a CPU or the disk is in R or D
LOOK_SECONDS = 0.25
MEMORY_BYTES = 3 << 30  # of address space beyond a worker's at its start
REPOSITORY = Path(__file__).parents[2]
FLOORS = tuple(f"{REPOSITORY}/{floor}/" for floor in ("pipeline", "stages", "parallel"))
# Characters that act on a terminal or break a line: controls, separators, reordering marks.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
FAILURES = ("traceback", "hang", "death", "unclear", "control", "changed", "difference")


@dataclass(frozen=True)
class FuzzStep:
    """The outcome of one step of a case, a failure if `verdict` is one of FAILURES.

    Failures with one `where` have one cause.
    """

    name: str
    verdict: str
    where: str = ""
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.verdict in FAILURES


Case = Callable[[int], Iterator[FuzzStep]]


def raised(name: str, error: BaseException) -> FuzzStep:
    """Return the failure of a step that raised an unexpected exception."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_project(frame.filename)]
    place = own[-1] if own else frames[-1]
    file = os.path.relpath(place.filename, REPOSITORY)
    where = f"{type(error).__name__} at {file}:{place.lineno} in {place.name}"
    # A RecursionError's last frames suffice, and formatting all of them may take too long.
    text = "".join(traceback.format_exception(error, limit=-12))
    return FuzzStep(name, "traceback", where, text)


def run(case: Case, numbers: Iterable[int]) -> Iterator[tuple[int, FuzzStep]]:
    """Yield every step of every case in order; a case that hangs or dies ends with a failure."""
    worker: _FuzzWorker | None = None
    for number in numbers:
        worker = worker or _FuzzWorker(case)
        for step in worker.steps(number):
            yield number, step
            if step.verdict in ("hang", "death"):
                worker.close()
                worker = None
                break
    if worker is not None:
        worker.close()


class _FuzzWorker:
    """A forked process and its watchdog."""

    def __init__(self, case: Case) -> None:
        fork = multiprocessing.get_context("fork")
        self._pipe, other = fork.Pipe()
        self._stack = tempfile.TemporaryFile()  # noqa: SIM115, closed by close()
        self._process = fork.Process(target=_work, args=(case, other, self._stack), daemon=True)
        self._process.start()
        other.close()

    def steps(self, number: int) -> Iterator[FuzzStep]:
        """Yield the steps of a case; a hang or a death is the last one."""
        self._pipe.send(number)
        last = "start"
        while True:
            if (stuck := self._wait()) is not None:
                yield FuzzStep(last, "hang", f"{stuck} {self._where()}", self._stack_text())
                return
            try:
                found = self._pipe.recv()
            except (EOFError, ConnectionError):
                self._process.join()
                yield FuzzStep(last, "death", f"exit code {self._process.exitcode}")
                return
            if found is None:
                return
            step = FuzzStep(**found)
            last = f"after {step.name}"
            yield step

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.join()
        self._pipe.close()
        self._stack.close()

    def _wait(self) -> str | None:
        """Wait for the next message. Return why the step counts as stuck, or None."""
        asleep, used = 0.0, self._processor_seconds()
        while not self._pipe.poll(LOOK_SECONDS):
            if self._processor_seconds() - used >= STEP_SECONDS:
                return f"over {STEP_SECONDS:g} s"
            asleep += LOOK_SECONDS if self._status()[0] == "S" else 0
            if asleep >= BLOCKED_SECONDS:
                return f"blocked for {BLOCKED_SECONDS:g} s"
        return None

    def _status(self) -> list[str]:
        text = Path(f"/proc/{self._process.pid}/stat").read_text()
        return text.rpartition(")")[2].split()

    def _processor_seconds(self) -> float:
        user, system = self._status()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def _stack_text(self) -> str:
        """Ask the process where it is, which works inside of C code too."""
        if not self._stack.seek(0, os.SEEK_END):
            os.kill(self._process.pid or 0, signal.SIGUSR1)
            time.sleep(0.5)
        self._stack.seek(0)
        return self._stack.read().decode(errors="replace")

    def _where(self) -> str:
        """Return the innermost line of the project that the process is at."""
        lines = self._stack_text().splitlines()
        own = [line.strip() for line in lines if _is_project(line.partition('"')[2])]
        own += ["at an unknown line"]
        return own[0].removeprefix("File ").replace(f"{REPOSITORY}/", "")


def _is_project(path: str) -> bool:
    return path.startswith(FLOORS)


def _work(case: Case, pipe: Connection, stack: Any) -> None:
    """Run the cases that the pipe names, until it is closed."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
    while True:
        try:
            number = pipe.recv()
        except EOFError:
            return
        try:
            for step in case(number):
                pipe.send(asdict(step))
        except BaseException as error:
            pipe.send(asdict(raised("case", error)))
        pipe.send(None)
