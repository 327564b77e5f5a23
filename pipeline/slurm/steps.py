"""The ranks and engines of a stage as steps (srun) of this launcher's job."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from parallel.engine.environment import PROCESS_ENVIRONMENT
from parallel.errors import NOTICE_MARK, STATUS_DESCRIPTOR
from parallel.network import address_of, environment_of
from parallel.settings import EngineSettings
from pipeline.config.cluster import ClusterSettings, ContainerSettings
from pipeline.launch.placement import free_port
from pipeline.launch.processes import (
    POLL_SECONDS,
    Child,
    Process,
    ProcessFailure,
    lost_another,
    told_failure,
)
from pipeline.slurm.nodes import Places

END_SECONDS = 15.0  # how long Slurm may take to end a step before its srun is killed
TASKS_ENDED = re.compile(r"(\S+): tasks? ([\d,-]+): (.+)")
CONTROLLER_AWAY = "Unable to contact slurm controller"
# Endings that the program itself caused; any other, such as a signal, may mean a lost node.
OWN_ERRORS = (*(f"exit code {code}" for code in range(1, 128)), "Out Of Memory")


class SlurmJob:
    """A placement that starts steps on the nodes of this job."""

    def __init__(self, places: Places, engine: EngineSettings, cluster: ClusterSettings) -> None:
        self.interface = cluster.network_interface or ""
        self._places = places
        self._engine = engine
        self._cluster = cluster

    def start_ranks(
        self, command: Sequence[str], world: int, directory: Path, beside_engines: bool
    ) -> list[Process]:
        nodes, per_node = self._places.rank_nodes, self._places.ranks_per_node
        options = [
            f"--nodes={len(nodes)}",
            f"--nodelist={','.join(nodes)}",
            f"--ntasks={world}",
            f"--ntasks-per-node={min(world, per_node)}",
            f"--cpus-per-task={self._cluster.cpus_per_rank}",
            "--distribution=block",
            "--kill-on-bad-exit=1",
            f"--output={directory.absolute()}/rank_%t.log",
        ]
        rendezvous = {
            # The launcher runs on the first node, where rank 0 is.
            "MASTER_ADDR": address_of(self.interface),
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": str(self._cluster.cpus_per_rank),
            **environment_of(self.interface),
        }
        logs = [directory / f"rank_{rank}.log" for rank in range(world)]
        srun = self._srun(options, command)
        return [Step("rank", srun, directory / "srun.log", logs, rendezvous)]

    def start_engine(self, name: str, index: int, command: Sequence[str], log: Path) -> Process:
        node, devices = self._places.engines[index]
        options = [
            "--nodes=1",
            f"--nodelist={node}",
            "--ntasks=1",
            "--ntasks-per-node=1",
            f"--cpus-per-task={self._engine.tensor * self._cluster.cpus_per_rank}",
            f"--output={log.absolute()}",
        ]
        environment = PROCESS_ENVIRONMENT | environment_of(self.interface)
        if self._cluster.gpus_per_node:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
        srun = self._srun(options, command)
        return Step(name, srun, log.with_name("srun.log"), [log], environment)

    def _srun(self, options: Sequence[str], command: Sequence[str]) -> list[str]:
        shared = [
            "--overlap",  # ranks and engines share cores and devices in turn
            "--mem=0",
            "--cpu-bind=none",
            "--open-mode=append",
            "--export=ALL",
        ]
        # The status pipe does not reach another node; messages are read from the log instead.
        start = ["env", f"--unset={STATUS_DESCRIPTOR}", "srun", *shared, *options]
        return [*start, *contained(self._cluster.container, command)]


class Step:
    """A step, seen through its srun; each task writes its own log."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        logs: Sequence[Path],
        environment: Mapping[str, str],
    ) -> None:
        self.name = name
        self.log = log
        self._logs = logs
        self._starts = [_size(each) for each in logs]
        self._heard = list(self._starts)
        self._log_start = _size(log)
        for each in logs:
            each.parent.mkdir(parents=True, exist_ok=True)
        self._srun = Child(f"srun of {name}", command, log, environment)

    def status(self) -> int | None:
        """Return the exit status of srun, which is the highest of its tasks'."""
        return self._srun.status()

    def send(self, number: signal.Signals) -> None:
        """Signal every task. srun forwards SIGUSR1; on SIGTERM it kills the step."""
        passed = {signal.SIGTERM: signal.SIGUSR1, signal.SIGKILL: signal.SIGTERM}
        self._srun.send_alone(passed.get(number, number))

    def reap(self) -> None:
        """End the step and wait for it."""
        self.send(signal.SIGKILL)
        deadline = time.monotonic() + END_SECONDS
        while self._srun.status() is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        self._srun.reap()

    def notices(self) -> list[str]:
        """Return the notices that the logs have gained since the last call."""
        found = []
        for index, log in enumerate(self._logs):
            if _size(log) <= self._heard[index]:
                continue
            with log.open("rb") as file:
                file.seek(self._heard[index])
                whole, newline, _ = file.read().rpartition(b"\n")
            self._heard[index] += len(whole) + len(newline)
            lines = whole.decode(errors="replace").splitlines()
            found += [line for line in lines if line.startswith(NOTICE_MARK)]
        return [line.removeprefix(NOTICE_MARK) for line in found]

    def failure(self) -> ProcessFailure:
        """Return the failure that explains the others.

        That is a task's own error message, else the first task to end without having lost a peer.
        """
        errors = self._srun_errors()
        lost = [
            line for mark in ("Node failure", CONTROLLER_AWAY) for line in errors if mark in line
        ]
        if lost:
            return ProcessFailure(lost[0], self.log, lost=True)
        endings = {task: how for line in errors for task, how in _ending(line)}
        order = [*endings, *range(len(self._logs))]

        def of_task(task: int) -> ProcessFailure:
            name = self.name if len(self._logs) == 1 else f"{self.name} {task}"
            how = endings.get(task, "was ended")
            killed = not how.endswith(OWN_ERRORS)
            return told_failure(f"{name} {how}", killed, self._logs[task], self._starts[task])

        def doubt(failure: ProcessFailure) -> tuple[bool, bool, int]:
            position = order.index(self._logs.index(failure.log))
            return not failure.stated, lost_another(failure.tail), position

        failures = [of_task(task) for task, log in enumerate(self._logs) if log.exists()]
        return min(failures, key=doubt) if failures else self._srun.failure()

    def _srun_errors(self) -> list[str]:
        if not self.log.exists():
            return []
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            lines = file.read().decode(errors="replace").splitlines()
        mark = "srun: error: "
        return [line.removeprefix(mark) for line in lines if line.startswith(mark)]


def _ending(line: str) -> list[tuple[int, str]]:
    """Return (task, how it ended) from a line such as `n2: tasks 1,3: Exited with exit code 1`."""
    found = TASKS_ENDED.fullmatch(line)
    if not found:
        return []
    node, tasks, how = found.groups()
    return [(task, f"on {node}: {how}") for task in _numbers(tasks)]


def _numbers(text: str) -> list[int]:
    """Return the numbers of a list such as `0-2,5`."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def job_number() -> str:
    """Return this job's number as `squeue --array` shows it.

    Raises KeyError outside of a job.
    """
    if "SLURM_ARRAY_TASK_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ["SLURM_JOB_ID"]


def contained(container: ContainerSettings | None, command: Sequence[str]) -> list[str]:
    """Return the command inside the container's image; for pyxis, with srun's options before it."""
    if container is None:
        return list(command)
    inside = [container.python, *command[1:]]
    if container.runtime == "pyxis":
        mounts = [f"--container-mounts={','.join(container.mounts)}"] if container.mounts else []
        where = f"--container-workdir={Path.cwd()}"
        return [f"--container-image={container.image}", *mounts, where, *inside]
    binds = [part for mount in container.mounts for part in ("--bind", mount)]
    return ["apptainer", "exec", "--nv", *binds, "--pwd", str(Path.cwd()), container.image, *inside]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
