"""The placement of a job's processes: on this machine, or as steps of a Slurm job."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from parallel.engine.environment import PROCESS_ENVIRONMENT
from parallel.network import LOOPBACK, address_of, environment_of
from parallel.settings import EngineSettings
from pipeline.config.environment import share_out
from pipeline.launch.forkserver import ForkServer, ForkServers
from pipeline.launch.processes import Child, Process, kill


class Placement(Protocol):
    """A place to start the processes of a job; they listen on `interface`: `parallel.network`."""

    interface: str

    def start_ranks(
        self, command: Sequence[str], world: int, directory: Path, beside_engines: bool
    ) -> list[Process]:
        """Start the ranks of a stage, with their logs in `directory`."""

    def start_engine(self, name: str, index: int, command: Sequence[str], log: Path) -> Process:
        """Start an engine.

        Raises:
            BraidError: no cores or nodes are left for it.
        """


class ThisMachine:
    """A placement on this machine, on the given `cores` or all that this process may use.

    Processes are forked from `servers` where there are any.
    """

    interface = LOOPBACK

    def __init__(
        self,
        engine: EngineSettings,
        cores: Sequence[int] | None = None,
        servers: ForkServers | None = None,
    ) -> None:
        self._engine = engine
        self._cores = cores
        self._servers = servers

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
        # Engines of a stage that does not sample are idle, so the ranks may use every core.
        cores = share_out(self._engine, self._cores).ranks if beside_engines else None
        ranks: list[Process] = []
        try:
            for rank in range(world):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                log = directory / f"rank_{rank}.log"
                environment = {**common, **own}
                where = cores or self._cores
                name = f"rank {rank}"
                ranks.append(Child(name, command, log, environment, where, self._server(command)))
        except OSError:
            kill(ranks)
            raise
        return ranks

    def start_engine(self, name: str, index: int, command: Sequence[str], log: Path) -> Process:
        cores = share_out(self._engine, self._cores).engines[index]
        environment = PROCESS_ENVIRONMENT | environment_of(self.interface)
        where = cores or self._cores
        return Child(name, command, log, environment, where, self._server(command))

    def _server(self, command: Sequence[str]) -> ForkServer | None:
        return self._servers.of(command) if self._servers else None


def free_port() -> int:
    """Return a TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
