"""The placement of a job's processes: on this machine, where they are forked if possible.

`parallel.machine.forkserver` is the fork server's side. Stages and engines use separate servers,
since they import different packages under different environments. On machines with CUDA no server
is used: a CUDA context does not survive a fork. `pipeline.slurm.steps` has the placement in a Slurm
job.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from parallel.engine.platform import GPU_FILE, process_environment
from parallel.machine.forkserver import PR_SET_CHILD_SUBREAPER, prctl
from parallel.machine.gpus import hidden_gpus
from parallel.machine.network import LOOPBACK, address_of, environment_of, free_port
from parallel.machine.on_gpus import RANK
from parallel.machine.slots import VISIBLE, MachineGpus, gpu_environment, own_first, share_cores
from parallel.settings import EngineSettings
from pipeline.launch.processes import Child, PendingFork, Process, RequestFork, kill, python_module

# The module that a command runs with `python -m`, and the module that imports all it needs.
PRELOADS = {"stages.main": "stages.preload", "parallel.engine.server": "parallel.engine.preload"}
# A process with threads cannot be forked safely, and NumPy's OpenBLAS and Arrow's jemalloc would
# each start one when they are loaded. OpenMP reads its number of threads then: a rank's is 1.
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
OWN_ENVIRONMENT = {
    "stages.main": {"OMP_NUM_THREADS": "1"},
    "parallel.engine.server": process_environment(on_gpus=False),
}


@dataclass(frozen=True)
class Programs:
    """The commands of a stage's rank and of an engine, each from the path of its job."""

    stage: Callable[[Path], list[str]] = lambda job: python_module("stages.main", job)
    engine: Callable[[Path], list[str]] = lambda job: python_module("parallel.engine.server", job)


class ForkServer:
    """A fork server of one program, a `process`; no method of it blocks."""

    def __init__(self, module: str, log: Path) -> None:
        self._module = module
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A server that still imports reads no requests: those that its buffer has no room for
        # are started with exec.
        self._control.setblocking(False)
        descriptor = str(theirs.fileno())
        with theirs:
            self.process = Child(
                f"fork server of {module}",
                [sys.executable, "-m", "parallel.machine.forkserver", descriptor, PRELOADS[module]],
                log,
                ENVIRONMENT | OWN_ENVIRONMENT[module],
                keep=[theirs.fileno()],
            )

    def request_fork(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        cores: Sequence[int] | None,
        output_fd: int,
        status_fd: int,
    ) -> PendingFork:
        """Request a process of the program, with its output and status pipe on these descriptors.

        Raises:
            OSError: the request cannot be sent.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {
            "launcher": os.getpid(),
            "module": self._module,
            "arguments": list(arguments),
            "environment": dict(environment),
            "cores": None if cores is None else list(cores),
        }
        message = json.dumps(request).encode()
        with theirs:
            try:
                socket.send_fds(self._control, [message], [theirs.fileno(), output_fd, status_fd])
            except OSError:
                ours.close()
                raise
        return PendingFork(ours, self.process)

    def close(self) -> None:
        """Kill the server, but not the processes that it forked."""
        self._control.close()
        self.process.reap()


class ForkServers:
    """A context in which ranks and engines are forked where possible; servers log to `logs`."""

    def __init__(self, logs: Path, enabled: bool) -> None:
        self._logs = logs
        self._enabled = enabled and not GPU_FILE.exists()
        self._servers: dict[str, ForkServer] = {}

    def __enter__(self) -> ForkServers:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers.values():
            server.close()

    def of(self, command: Sequence[str]) -> RequestFork | None:
        """Return `request_fork` of the server of a command's program, started if necessary.

        None where the program has no server, or servers are disabled or unfit.
        """
        module = command[2] if command[:2] == [sys.executable, "-m"] else None
        if not self._enabled or module not in PRELOADS:
            return None
        server = self._servers.get(module)
        if server is None or (server.process.status() or 0) < 0:  # it was killed
            if server is not None:
                server.close()
            # Forked processes are orphaned by their server and become our children.
            prctl(PR_SET_CHILD_SUBREAPER, 1)
            server = self._servers[module] = ForkServer(module, self._logs / f"{module}.log")
        return server.request_fork if server.process.status() is None else None


class Placement(Protocol):
    """A place to start the processes of a job; they listen on `interface` (machine/network.py).

    Each engine spreads over `nodes_per_engine` nodes; `on_gpus` means that processes have GPUs.
    """

    interface: str
    nodes_per_engine: int
    on_gpus: bool

    def start_ranks(
        self, command: Sequence[str], world: int, directory: Path, beside_engines: bool
    ) -> list[Process]:
        """Start the ranks of a stage, with their logs in `directory`."""

    def start_engine(self, name: str, index: int, command: Sequence[str], log: Path) -> Process:
        """Start an engine.

        Raises:
            UserError: no cores or nodes are left for it.
        """


class ThisMachine:
    """A placement on this machine, on the given `cores` or all that this process may use.

    With `gpus` each process sees those that it may use, and any core: the work is on the devices.
    Processes are forked from `servers` where there are any.
    """

    interface = LOOPBACK
    nodes_per_engine = 1

    def __init__(
        self,
        engine: EngineSettings,
        cores: Sequence[int] | None = None,
        servers: ForkServers | None = None,
        gpus: MachineGpus | None = None,
    ) -> None:
        self._engine = engine
        self._cores = cores
        self._servers = servers
        self._gpus = gpus
        self.on_gpus = gpus is not None

    def start_ranks(
        self, command: Sequence[str], world: int, directory: Path, beside_engines: bool
    ) -> list[Process]:
        common = {
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": address_of(self.interface),
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
            **environment_of(self.interface),
        }
        if self._gpus:
            common |= self._visible(self._gpus.stage)
            command = on_gpus(command, RANK)
        # Engines of a stage that does not sample are idle, so the ranks may use every core.
        shared = beside_engines and self._gpus is None
        cores = share_cores(self._engine, self._cores).ranks if shared else None
        ranks: list[Process] = []
        try:
            for rank in range(world):
                environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                log = directory / f"rank_{rank}.log"
                ranks.append(self._start(f"rank {rank}", command, log, environment, cores))
        except OSError:
            kill(ranks)
            raise
        return ranks

    def start_engine(self, name: str, index: int, command: Sequence[str], log: Path) -> Process:
        environment = process_environment(self.on_gpus) | environment_of(self.interface)
        if self._gpus:
            engine_gpus = self._gpus.engines[index]
            environment |= self._visible(own_first(engine_gpus, self._gpus.stage))
            slots = ",".join(map(str, range(len(engine_gpus))))  # the first that it sees
            return self._start(name, on_gpus(command, slots), log, environment, None)
        cores = share_cores(self._engine, self._cores).engines[index]
        return self._start(name, command, log, environment, cores)

    @staticmethod
    def _visible(positions: Sequence[int]) -> dict[str, str]:
        return gpu_environment(positions, os.environ.get(VISIBLE))

    def _start(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        cores: Sequence[int] | None,
    ) -> Child:
        if self._gpus is None:
            environment = {**hidden_gpus(), **environment}
        request_fork = self._servers.of(command) if self._servers else None
        return Child(name, command, log, environment, cores or self._cores, request_fork)


def on_gpus(command: Sequence[str], slots: str, caches: str = "") -> list[str]:
    """Return a Python command that starts on slots of the visible GPUs (machine/on_gpus.py)."""
    return [command[0], "-m", "parallel.machine.on_gpus", slots, caches, *command[1:]]
