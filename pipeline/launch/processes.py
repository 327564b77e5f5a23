"""Child processes that end with this process, together with everything that they started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from parallel.errors import ERROR_MARK, NOTICE_MARK, STATUS_DESCRIPTOR, UserError, is_lost_peer
from parallel.files import open_in_place
from parallel.machine.forkserver import PR_SET_PDEATHSIG, prctl
from pipeline.text import signal_name

POLL_SECONDS = 0.05
FORK_SECONDS = 60.0  # timeout of a fork server's imports and one fork
TAIL_LINES = 8
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TIME_IS_UP = signal.SIGUSR1  # from `--signal=B:USR1@...`, before the walltime ends


@dataclass(frozen=True)
class ProcessFailure:
    """The cause of a process's failure, to be shown.

    `stated` means that the process reported the cause itself; otherwise `tail` has the last lines
    of its log. `lost` means that the process was killed, or lost a process that it needs.
    """

    cause: str
    log: Path
    stated: bool = False
    tail: tuple[str, ...] = ()
    lost: bool = False


class ForkLost(Exception):
    """A requested fork will not arrive."""


@dataclass
class Forked:
    """A child process that came from a fork server; it has the part of Popen that `Child` uses."""

    pid: int
    returncode: int | None = None

    def wait(self) -> int:
        """Wait for the process to end; return its exit status, or minus the signal's number."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


class PendingFork:
    """A requested process that may not have been forked yet."""

    def __init__(self, link: socket.socket, server: Child) -> None:
        self._link, self._server = link, server
        self._link.setblocking(False)
        self._deadline = time.monotonic() + FORK_SECONDS

    def poll(self) -> Forked | None:
        """Return the process once it is a child of this one; None before.

        Raises:
            ForkLost: the server ended or did not answer within FORK_SECONDS.
        """
        try:
            answer = self._link.recv(64)
        except BlockingIOError:
            if time.monotonic() > self._deadline:
                self.cancel()
                self._server.send(signal.SIGKILL)  # then `placement.ForkServers` starts another
                raise ForkLost(f"no fork after {FORK_SECONDS:g} s") from None
            return None
        except OSError:
            answer = b""
        if not answer:
            self.cancel()
            raise ForkLost("the fork server has ended")
        with contextlib.suppress(OSError):  # it was killed meanwhile: its exit status shows that
            self._link.send(b"!")
        self._link.close()
        return Forked(int(answer))

    def cancel(self) -> None:
        """Cancel the request; a process that is forked nevertheless exits at once."""
        self._link.close()


# Requests a fork with these arguments, environment, cores, output_fd and status_fd (the descriptors
# of its output and its status pipe); raises OSError where the request cannot be sent.
RequestFork = Callable[
    [Sequence[str], Mapping[str, str], Sequence[int] | None, int, int], PendingFork
]


class Process(Protocol):
    """A process of a launcher: a child on this machine, or the tasks of a Slurm step."""

    name: str
    log: Path

    def status(self) -> int | None:
        """Return its exit status, or minus the signal that killed it; None while it runs."""

    def send(self, number: signal.Signals) -> None:
        """Signal it and everything it started."""

    def reap(self) -> None:
        """Kill it and everything it started, and wait for it."""

    def notices(self) -> list[str]:
        """Return the notices that it reported since the last call."""

    def failure(self) -> ProcessFailure:
        """Return the cause of an ended process's failure: the one it reported, if any."""


class Child:
    """A process in a new session, with its output in a log file.

    In a new session the terminal's Ctrl-C does not reach it: the launcher decides how it ends. It
    and everything it starts run on the given `cores`, or on all of the launcher's. A fork server
    forks it where `request_fork` is given; else, or when the fork is lost, it starts with exec.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        cores: Sequence[int] | None = None,
        request_fork: RequestFork | None = None,
        keep: Sequence[int] = (),
    ) -> None:
        """Start the process; one started with exec also inherits the descriptors in `keep`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self.name = name
        self.log = log
        self._command, self._cores, self._keep = command, cores, keep
        self._environment = {**os.environ, "PYTHONUNBUFFERED": "1", **environment}
        self._log_start = size(log)
        self._unread = b""
        self._notices: list[str] = []
        self._reported = ""
        self._status_pipe, self._theirs = os.pipe()
        os.set_blocking(self._status_pipe, False)
        self._fork: PendingFork | None = None
        self._process: subprocess.Popen[bytes] | Forked | None = None
        try:
            if request_fork is None or not self._request(request_fork):
                self._execute()
        except BaseException:
            os.close(self._status_pipe)
            self._close_theirs()
            raise

    def status(self) -> int | None:
        """Return the exit status, or minus the signal that killed it; None while it runs."""
        if (process := self._started()) is None:
            return None
        if process.returncode is not None:
            return process.returncode
        # The ended process is left unreaped, so that its process group's number is not reused
        # before `reap` has signalled the group.
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        ended = os.waitid(os.P_PID, process.pid, options)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def send(self, number: signal.Signals, *, alone: bool = False) -> None:
        """Signal the process and everything it started, or it `alone`; cancel a pending fork."""
        # A lost fork is not replaced only to be ended.
        if (process := self._started(replace=False)) is not None:
            if process.returncode is None:
                (os.kill if alone else os.killpg)(process.pid, number)
        elif self._fork is not None:
            self._fork.cancel()
            self._fork, self._process = None, Forked(0, returncode=-number)
            self._close_theirs()

    def reap(self) -> None:
        """Kill the process and everything it started, and wait for it."""
        self.send(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()
        with contextlib.suppress(ChildProcessError):
            # Its orphans became our children if we are a subreaper.
            while self._process.pid and os.waitpid(-self._process.pid, os.WNOHANG)[0]:
                pass
        self._listen()
        os.close(self._status_pipe)
        self._status_pipe = -1

    def _request(self, request_fork: RequestFork) -> bool:
        """Request the process; return whether the request was sent."""
        arguments = self._command[3:]  # after python -m MODULE
        with open_in_place(self.log, "ab") as output, contextlib.suppress(OSError):
            self._fork = request_fork(
                arguments, self._environment, self._cores, output.fileno(), self._theirs
            )
        return self._fork is not None

    def _started(self, *, replace: bool = True) -> subprocess.Popen[bytes] | Forked | None:
        """Return the process; None while its fork is pending, or lost and not to `replace`."""
        if self._fork is not None:
            try:
                self._process = self._fork.poll()
            except ForkLost:
                if not replace:
                    return None
                self._fork = None
                try:
                    self._execute()
                except OSError as error:  # counts as the failure of the process
                    self._reported = f"{ERROR_MARK}{self.name} cannot be started: {error}"
                    self._process = Forked(0, returncode=1)
            if self._process is not None:
                self._fork = None
                self._close_theirs()
        return self._process

    def _execute(self) -> None:
        try:
            with open_in_place(self.log, "ab") as output:
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

    def _close_theirs(self) -> None:
        """Close the writing end of the status pipe, which the process has inherited."""
        if self._theirs >= 0:
            os.close(self._theirs)
            self._theirs = -1

    def notices(self) -> list[str]:
        """Return the notices that the process reported since the last call."""
        self._listen()
        heard, self._notices = self._notices, []
        return heard

    def failure(self) -> ProcessFailure:
        """Return the cause of the ended process's failure: the one it reported, if any."""
        self._listen()
        if (status := self.status() or 0) >= 0:
            ending = f"ended with exit status {status}"
        else:
            hint = " (out of memory?)" if -status == signal.SIGKILL else ""
            ending = f"was killed by {signal_name(-status)}{hint}"
        ending = f"{self.name} {ending}"
        return failure_from_log(ending, status < 0, self.log, self._log_start, self._reported)

    def _listen(self) -> None:
        """Read the status pipe, which works even where the log cannot be written."""
        with contextlib.suppress(OSError):  # empty or closed
            while heard := os.read(self._status_pipe, 1 << 16):
                self._unread += heard
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            message = line.decode(errors="replace")
            if message.startswith(NOTICE_MARK):
                self._notices.append(message.removeprefix(NOTICE_MARK))
            else:
                self._reported = self._reported or message


def failure_from_log(
    ending: str, killed: bool, log: Path, start: int, reported: str = ""
) -> ProcessFailure:
    """Return the cause that a process `reported`, or logged from byte `start` on, else `ending`."""
    lines = log_lines(log, start)
    for line in [reported, *reversed(lines)]:
        if line.startswith(ERROR_MARK):
            return ProcessFailure(line.removeprefix(ERROR_MARK), log, stated=True)
    tail = tuple(lines[-TAIL_LINES:])
    return ProcessFailure(ending, log, tail=tail, lost=killed or lost_another(tail))


def log_lines(log: Path, start: int) -> list[str]:
    """Return the lines of a log from byte `start` on, without empty ones at the end."""
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace").rstrip().splitlines()


def size(log: Path) -> int:
    """Return the bytes of a log; 0 where there is none."""
    return log.stat().st_size if log.exists() else 0


def lost_another(tail: Sequence[str]) -> bool:
    """Return whether a rank's last lines report a lost connection to another rank."""
    return any(map(is_lost_peer, tail))


def kill(children: Sequence[Process]) -> None:
    """Kill all of them, with everything they started."""
    for child in children:
        child.send(signal.SIGKILL)
    for child in children:
        child.reap()


def wait_for_all(
    children: Sequence[Process], seconds: float, cut_short: Callable[[], bool] = lambda: False
) -> None:
    """Wait until every child has ended, `seconds` have passed or `cut_short` returns true."""
    deadline = time.monotonic() + seconds
    while any(child.status() is None for child in children):
        if time.monotonic() > deadline or cut_short():
            return
        time.sleep(POLL_SECONDS)


def python_module(module: str, argument: Path) -> list[str]:
    """Return the command that runs a module of this installation with one argument."""
    return [sys.executable, "-m", module, str(argument)]


def _prepared(parent: int, cores: Sequence[int] | None) -> Callable[[], None]:
    """Return a `preexec_fn` that has the kernel kill the child when its parent ends."""

    def prepare() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        if cores is not None:
            os.sched_setaffinity(0, cores)

    return prepare


class Stopped(UserError):
    """A signal asked the launcher to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number
        self.exit_code = 128 + number


class Signals:
    """A context in which stop signals are only recorded.

    An exception raised by a handler could strike between starting a process and storing it.
    """

    def __init__(self, numbers: Sequence[int] = STOP_SIGNALS) -> None:
        self._numbers = numbers
        self._handlers: dict[int, Any] = {}
        self._received: list[int] = []

    def __enter__(self) -> Signals:
        for number in self._numbers:
            self._handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def count(self, number: int) -> int:
        """Return how often a signal was received."""
        return self._received.count(number)

    def check(self) -> None:
        """Raise Stopped if a signal was received; a stop request precedes the time limit."""
        for number in sorted(self._received, key=lambda number: number == TIME_IS_UP):
            raise Stopped(number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received.append(number)
