"""The launcher's side of the fork servers: `parallel.forkserver` is the other.

A stage and an engine each have a server of their own, since they import different packages under
different environments. None is used where CUDA is, whose contexts do not survive a fork.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from parallel.engine.environment import PROCESS_ENVIRONMENT
from parallel.status_pipe import STATUS_DESCRIPTOR
from pipeline.launch.processes import Child, Forked, ForkLost

GPU_FILE = Path("/dev/nvidiactl")  # the driver's, whatever torch thinks of it
FORK_SECONDS = 60.0  # what a server may take for its imports and a fork

# By the module that a command runs with `python -m`: what imports all that it needs.
PRELOADS = {"stages.main": "stages.preload", "parallel.engine.server": "parallel.engine.preload"}
# NumPy's OpenBLAS and Arrow's jemalloc would each start a thread when they are loaded. OpenMP reads
# its number of threads then: a rank's is 1.
ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
OWN_ENVIRONMENT = {
    "stages.main": {"OMP_NUM_THREADS": "1"},
    "parallel.engine.server": PROCESS_ENVIRONMENT,
}

_PR_SET_CHILD_SUBREAPER = 36


class ForkServer:
    """A server of one program. It never waits: `RequestedFork.poll` awaits a requested fork."""

    def __init__(self, module: str, log: Path) -> None:
        self._module = module
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A server that still imports takes no requests yet: what its buffer has no room for is
        # started with exec.
        self._control.setblocking(False)
        descriptor = str(theirs.fileno())
        with theirs:
            self._process = Child(
                f"fork server of {module}",
                [sys.executable, "-m", "parallel.forkserver", descriptor, PRELOADS[module]],
                log,
                ENVIRONMENT | OWN_ENVIRONMENT[module],
                keep=[theirs.fileno()],
            )

    def fork(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        cores: Sequence[int] | None,
        output: int,
        status: int,
    ) -> RequestedFork:
        """Ask for a process that runs the program, with its output and its status lines on these
        descriptors. Raises OSError where the server cannot be asked."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {
            "launcher": os.getpid(),
            "module": self._module,
            "arguments": list(arguments),
            "environment": dict(environment),
            "cores": None if cores is None else list(cores),
            "status_variable": STATUS_DESCRIPTOR,
        }
        message = json.dumps(request).encode()
        with theirs:
            try:
                socket.send_fds(self._control, [message], [theirs.fileno(), output, status])
            except OSError:
                ours.close()
                raise
        return RequestedFork(ours, self)

    @property
    def state(self) -> str:
        """`running`; `killed`, and another may be started; or `unfit`: its imports failed."""
        status = self._process.status()
        if status is None:
            return "running"
        return "killed" if status < 0 else "unfit"

    def kill(self) -> None:
        """Have the server replaced: it does not answer."""
        self._process.send(signal.SIGKILL)

    def close(self) -> None:
        """Kill the server, and nothing that it forked."""
        self._control.close()
        self._process.reap()


class RequestedFork:
    """A process that was asked for, until it is there."""

    def __init__(self, link: socket.socket, server: ForkServer) -> None:
        self._link = link
        self._link.setblocking(False)
        self._server = server
        self._deadline = time.monotonic() + FORK_SECONDS

    def poll(self) -> Forked | None:
        """The process, once it is there and this process's child. Raises ForkLost where it will
        not come."""
        try:
            answer = self._link.recv(64)
        except BlockingIOError:
            if time.monotonic() > self._deadline:
                self.cancel()
                self._server.kill()
                raise ForkLost(f"no fork after {FORK_SECONDS:g} s") from None
            return None
        except OSError:
            answer = b""
        if not answer:
            self.cancel()
            raise ForkLost("the fork server has ended")
        with suppress(OSError):  # it was killed meanwhile, which its status will tell
            self._link.send(b"!")
        self._link.close()
        return Forked(int(answer))

    def cancel(self) -> None:
        """Stop waiting. The process, should it still come, exits before it does anything."""
        self._link.close()


class ForkServers:
    """Context in which ranks and engines may be forked; the servers end with it.

    `folder` is for the servers' logs.
    """

    def __init__(self, folder: Path, wanted: bool) -> None:
        self._folder = folder
        self._wanted = wanted and not GPU_FILE.exists()
        self._servers: dict[str, ForkServer] = {}

    def __enter__(self) -> ForkServers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for server in self._servers.values():
            server.close()

    def of(self, command: Sequence[str]) -> ForkServer | None:
        """The server of what a command runs, started where it was not or was killed; None for a
        command that has none and where servers are off or of no use."""
        module = command[2] if command[:2] == [sys.executable, "-m"] else None
        if not self._wanted or module not in PRELOADS:
            return None
        server = self._servers.get(module)
        if server is not None and server.state == "killed":
            server.close()
            server = None
        if server is None:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what is forked becomes our child
            server = ForkServer(module, self._folder / f"{module}.log")
            self._servers[module] = server
        return server if server.state == "running" else None
