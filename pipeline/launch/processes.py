"""Child processes that never outlive their parent, and that take their own children with them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

from parallel.status_pipe import ERROR_MARK, LOST_PEER, NOTICE_MARK, STATUS_DESCRIPTOR
from pipeline.errors import BraidError

POLL_SECONDS = 0.05
TAIL_LINES = 8
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TIME_IS_UP = signal.SIGUSR1  # from `--signal=B:USR1@...`, before the walltime ends

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class ProcessFailure:
    """Why a process ended badly, for a person.

    `stated` means that the process gave the cause itself; else `tail` is the end of its log. What
    was `lost` did nothing wrong itself: it was killed, or another one that it needs was.
    """

    cause: str
    log: Path
    stated: bool = False
    tail: tuple[str, ...] = ()
    lost: bool = False


class ForkLost(Exception):
    """A fork that was asked for will not come."""


@dataclass
class Forked:
    """A process that a fork server has forked for this one, whose child it is; the part of Popen
    that `Child` needs."""

    pid: int
    returncode: int | None = None

    def wait(self) -> int:
        """Return the exit status, or minus the signal that killed it, when it has ended."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


class PendingFork(Protocol):
    """A fork that was asked for."""

    def poll(self) -> Forked | None:
        """The process, once it is there. Raises ForkLost where it will not come."""

    def cancel(self) -> None:
        """Stop waiting; the process never runs."""


class ProgramForker(Protocol):
    """What forks a program on request: `pipeline.launch.forkserver`."""

    def fork(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        cores: Sequence[int] | None,
        output: int,
        status: int,
    ) -> PendingFork:
        """Ask for a process. Raises OSError where the server cannot be asked."""


class Process(Protocol):
    """What runs for a launcher: a child on this machine, or the tasks of a step of Slurm's."""

    name: str
    log: Path

    def status(self) -> int | None:
        """None while it runs; then its exit status, or minus the signal that killed it."""

    def send(self, number: signal.Signals) -> None:
        """Signal it and everything it started."""

    def reap(self) -> None:
        """Kill what is left of it and of everything it started, and wait for it."""

    def notices(self) -> list[str]:
        """What it said since the last call that a person should know, though it goes on."""

    def failure(self) -> ProcessFailure:
        """Why it failed, once it has ended: its own last word, if it had one."""


class Child:
    """A process in a session of its own, with its output in a log file.

    A session of its own keeps the terminal's Ctrl-C from it: the launcher decides how it ends.
    It and everything it starts run on the given `cores`, or wherever the launcher may. Where there
    is a fork `server` of the command's program, the process is forked there; it is started with
    exec where there is none, and where the server is lost.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        cores: Sequence[int] | None = None,
        server: ProgramForker | None = None,
        keep: Sequence[int] = (),
    ) -> None:
        """`keep` are further descriptors that a command started with exec inherits."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.log = log
        self._command, self._cores, self._keep = command, cores, keep
        self._environment = {**os.environ, "PYTHONUNBUFFERED": "1", **environment}
        self._log_start = log.stat().st_size if log.exists() else 0
        self._unread = b""
        self._notices: list[str] = []
        self._said = ""
        self._last_word, self._theirs = os.pipe()
        os.set_blocking(self._last_word, False)
        self._fork: PendingFork | None = None
        self._process: subprocess.Popen[bytes] | Forked | None = None
        try:
            if server is None or not self._ask(server):
                self._execute()
        except BaseException:
            os.close(self._last_word)
            self._close_theirs()
            raise

    def status(self) -> int | None:
        """None while it runs; then its exit status, or minus the signal that killed it."""
        if (process := self._started()) is None:
            return None
        if process.returncode is not None:
            return process.returncode
        # The ended process is left unreaped, so that nobody else can get its group's number
        # before `reap` has signalled the group.
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        ended = os.waitid(os.P_PID, process.pid, options)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def send(self, number: signal.Signals) -> None:
        """Signal the process and everything it started. One that is not there yet never comes."""
        if self._fork is not None and not self._arrived():
            self._cancel(number)
        elif (process := self._process) is not None and process.returncode is None:
            os.killpg(process.pid, number)

    def send_alone(self, number: signal.Signals) -> None:
        """Signal the process, and nothing that it started."""
        if self._fork is not None and not self._arrived():
            self._cancel(number)
        elif (process := self._process) is not None and process.returncode is None:
            os.kill(process.pid, number)

    def reap(self) -> None:
        """Kill what is left of the process and of everything it started, and wait for it."""
        self.send(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()
        with contextlib.suppress(ChildProcessError):
            # What it started and left became our children, if we are a subreaper.
            while self._process.pid and os.waitpid(-self._process.pid, os.WNOHANG)[0]:
                pass
        self._listen()
        os.close(self._last_word)
        self._last_word = -1

    def _ask(self, server: ProgramForker) -> bool:
        """Ask the server for the process; whether it could be asked."""
        arguments = self._command[3:]  # after python -m MODULE
        with self.log.open("ab") as output, contextlib.suppress(OSError):
            self._fork = server.fork(
                arguments, self._environment, self._cores, output.fileno(), self._theirs
            )
        return self._fork is not None

    def _arrived(self) -> bool:
        """Whether the process is there; one whose fork is lost is not started only to be ended."""
        assert self._fork is not None
        try:
            self._process = self._fork.poll()
        except ForkLost:
            return False
        if self._process is None:
            return False
        self._fork = None
        self._close_theirs()
        return True

    def _started(self) -> subprocess.Popen[bytes] | Forked | None:
        """The process, or None while the fork server has not given it."""
        if self._process is None and self._fork is not None:
            try:
                self._process = self._fork.poll()
            except ForkLost:
                self._fork = None
                self._execute_late()
            if self._process is not None:
                self._fork = None
                self._close_theirs()
        return self._process

    def _execute_late(self) -> None:
        """Start the process with exec, since its fork is lost. Where that fails too, it has ended,
        and its log says why."""
        try:
            self._execute()
        except OSError as error:
            self._said = f"{ERROR_MARK}{self.name} cannot be started: {error}"
            self._process = Forked(0, returncode=1)

    def _execute(self) -> None:
        """Start the process with exec."""
        try:
            with self.log.open("ab") as output:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**self._environment, STATUS_DESCRIPTOR: str(self._theirs)},
                    pass_fds=(self._theirs, *self._keep),
                    start_new_session=True,
                    preexec_fn=_prepared(os.getpid(), self._cores),
                )
        finally:
            self._close_theirs()

    def _cancel(self, number: signal.Signals) -> None:
        assert self._fork is not None
        self._fork.cancel()
        self._fork = None
        self._process = Forked(0, returncode=-number)
        self._close_theirs()

    def _close_theirs(self) -> None:
        """Let go of the status pipe's other end, which the process has now."""
        if self._theirs >= 0:
            os.close(self._theirs)
            self._theirs = -1

    def notices(self) -> list[str]:
        """What it said since the last call that a person should know, though it goes on."""
        self._listen()
        heard, self._notices = self._notices, []
        return heard

    def failure(self) -> ProcessFailure:
        """Why the ended process failed: its own last word, if it had one."""
        self._listen()
        killed = (self.status() or 0) < 0
        ending = f"{self.name} {self._ending()}"
        return told_failure(ending, killed, self.log, self._log_start, self._said)

    def _listen(self) -> None:
        """Take in what was said, which reaches us even where the log could not be written."""
        with contextlib.suppress(OSError):  # nothing was said, or it was taken in already
            while heard := os.read(self._last_word, 1 << 16):
                self._unread += heard
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            said = line.decode(errors="replace")
            if said.startswith(NOTICE_MARK):
                self._notices.append(said.removeprefix(NOTICE_MARK))
            else:
                self._said = self._said or said

    def _ending(self) -> str:
        status = self.status() or 0
        if status >= 0:
            return f"ended with exit status {status}"
        hint = " (out of memory?)" if -status == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-status).name}{hint}"


def told_failure(
    ending: str, killed: bool, log: Path, start: int, said: str = ""
) -> ProcessFailure:
    """The last word of a process that it `said`, or wrote to its log from byte `start` on; else
    how it ended, with the end of the log."""
    with log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").rstrip().splitlines()
    for line in [said, *reversed(lines)]:
        if line.startswith(ERROR_MARK):
            return ProcessFailure(line.removeprefix(ERROR_MARK), log, stated=True)
    tail = tuple(lines[-TAIL_LINES:])
    return ProcessFailure(ending, log, tail=tail, lost=killed or lost_another(tail))


def lost_another(tail: Sequence[str]) -> bool:
    """Whether a rank's last lines say that another one went away."""
    return any(LOST_PEER in line for line in tail)


def ask_to_stop(children: Sequence[Process]) -> None:
    """Send SIGTERM to all; a stage then saves what it has."""
    for child in children:
        child.send(signal.SIGTERM)


def kill(children: Sequence[Process]) -> None:
    """End all at once, with everything they started."""
    for child in children:
        child.send(signal.SIGKILL)
    for child in children:
        child.reap()


def wait_for_all(
    children: Sequence[Process], seconds: float, cut_short: Callable[[], bool] = lambda: False
) -> None:
    """Return when every child has ended, after so many seconds, or when `cut_short` says so."""
    deadline = time.monotonic() + seconds
    while any(child.status() is None for child in children):
        if time.monotonic() > deadline or cut_short():
            return
        time.sleep(POLL_SECONDS)


def python_module(module: str, argument: Path) -> list[str]:
    """The command that runs a module of this installation with one argument."""
    return [sys.executable, "-m", module, str(argument)]


def _prepared(parent: int, cores: Sequence[int] | None) -> Callable[[], None]:
    """Run between fork and exec, so that the kernel kills the child when the launcher ends."""

    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        if cores is not None:
            os.sched_setaffinity(0, cores)

    return prepare


class Stopped(BraidError):
    """A signal asked the launcher to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number
        self.exit_code = 128 + number


class Signals:
    """A context in which stop signals are only noted.

    An exception from a handler could fall between starting a process and storing it.
    """

    def __init__(self, numbers: Sequence[int] = STOP_SIGNALS) -> None:
        self._numbers = numbers
        self._handlers: dict[int, Any] = {}
        self._received: list[int] = []

    def __enter__(self) -> Signals:
        for number in self._numbers:
            self._handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def count(self, number: int) -> int:
        """Return how often a signal came."""
        return self._received.count(number)

    def check(self) -> None:
        """Raise Stopped when a signal came; a request to stop comes before the time limit."""
        for number in sorted(self._received, key=lambda number: number == TIME_IS_UP):
            raise Stopped(number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)
