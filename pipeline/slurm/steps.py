"""The ranks and engines of a stage on the nodes of its Slurm job, as steps (srun) of it."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel.engine.environment import process_environment
from parallel.errors import NOTICE_MARK, STATUS_DESCRIPTOR, UserError
from parallel.network import address_of, environment_of
from parallel.settings import EngineSettings, LayoutSettings
from pipeline.config.cluster import ClusterSettings, ContainerSettings
from pipeline.launch.placement import free_port
from pipeline.launch.processes import (
    POLL_SECONDS,
    Child,
    Process,
    ProcessFailure,
    failure_from_log,
    log_lines,
    lost_another,
    size,
)

END_SECONDS = 15.0  # how long Slurm may take to end a step before its srun is killed
TASKS_ENDED = re.compile(r"(\S+): tasks? ([\d,-]+): (.+)")
CONTROLLER_AWAY = "Unable to contact slurm controller"
# Endings that the program itself caused; any other, such as a signal, may mean a lost node.
OWN_ERRORS = (*(f"exit code {code}" for code in range(1, 128)), "Out Of Memory")


@dataclass(frozen=True)
class Places:
    """The nodes of the ranks, filled one after another, and every engine's node and devices."""

    rank_nodes: list[str]
    ranks_per_node: int
    engines: list[tuple[str, list[int]]]


def nodes_needed(
    layout: LayoutSettings, engine: EngineSettings | None, cluster: ClusterSettings
) -> int:
    """Return the number of nodes a stage needs; `engine` is None for a stage without sampling."""
    per_node = cluster.ranks_per_node
    ranks = -(-layout.ranks // per_node)
    if engine is None:
        return ranks
    if engine.placement == "shared":
        return max(ranks, -(-engine.count // (per_node // engine.tensor or 1)))
    return 1 + _own_slots(layout, engine, per_node)[-1][0]


def size_options(
    layout: LayoutSettings, engine: EngineSettings | None, cluster: ClusterSettings
) -> list[str]:
    """Return sbatch's options for the nodes of a stage and their share; `engine` as above."""
    options = [
        f"--nodes={nodes_needed(layout, engine, cluster)}",
        f"--ntasks-per-node={cluster.ranks_per_node}",
        f"--cpus-per-task={cluster.cpus_per_rank}",
    ]
    if cluster.gpus_per_node:
        of_type = f"{cluster.gpu_type}:" if cluster.gpu_type else ""
        options.append(f"--gpus-per-node={of_type}{cluster.gpus_per_node}")
    return options


def cpus_of(text: str) -> list[int]:
    """Return a job's CPUs on each node, from `SLURM_JOB_CPUS_PER_NODE`, such as `64(x2),32`."""
    found: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        found += [int(count)] * int(times or 1)
    return found


def too_few_cpus(
    places: Places, ranks: int, nodes: Sequence[str], cpus: Sequence[int], cpus_per_rank: int
) -> tuple[str, int, int] | None:
    """Return a node with fewer CPUs than srun needs there, and both numbers; None if all suffice.

    The ranks are one step and each engine is another; steps overlap.
    """
    for node, has in zip(nodes, cpus, strict=False):
        before = places.ranks_per_node * nodes.index(node)  # ranks on the nodes before this one
        on_node = min(ranks - before, places.ranks_per_node)
        engines = [len(devices) for where, devices in places.engines if where == node]
        if has < (takes := max(on_node, *engines, 0) * cpus_per_rank):
            return node, has, takes
    return None


def place(
    nodes: Sequence[str],
    layout: LayoutSettings,
    engine: EngineSettings,
    cluster: ClusterSettings,
    *,
    samples: bool,
) -> Places:
    """Return the places of a stage's ranks and engines on the `nodes` of its job.

    Engines with `placement: shared` are spread over all nodes in turn; those with `own` follow the
    last rank. No engine spans nodes.

    Raises:
        UserError: there are too few nodes, or an engine is larger than a node.
    """
    per_node = cluster.ranks_per_node
    if samples and engine.tensor > per_node:
        raise UserError(
            f"engine.tensor = {engine.tensor} exceeds the cluster's ranks_per_node = {per_node}; "
            "an engine must fit on one node"
        )
    needed = nodes_needed(layout, engine if samples else None, cluster)
    if len(nodes) < needed:
        raise UserError(
            f"this job has {len(nodes)} of the {needed} nodes that layout.ranks = {layout.ranks} "
            f"and the engines need at ranks_per_node = {per_node}; submit it with "
            f"{' '.join(size_options(layout, engine if samples else None, cluster))}"
        )
    rank_nodes = list(nodes[: -(-layout.ranks // per_node)])
    if engine.placement == "shared":
        an_engine = per_node // engine.tensor
        slots = [
            (index % needed, index // needed % an_engine * engine.tensor)
            for index in range(engine.count if samples else 0)
        ]
    else:
        slots = _own_slots(layout, engine, per_node) if samples else []
    engines = [(nodes[node], list(range(first, first + engine.tensor))) for node, first in slots]
    return Places(rank_nodes, per_node, engines)


def _own_slots(
    layout: LayoutSettings, engine: EngineSettings, per_node: int
) -> list[tuple[int, int]]:
    """Return the node and the first device of every engine, by number."""
    slots, free = [], layout.ranks
    for _ in range(engine.count):
        if free % per_node + engine.tensor > per_node:
            free += per_node - free % per_node
        slots.append((free // per_node, free % per_node))
        free += engine.tensor
    return slots


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
        environment = process_environment() | environment_of(self.interface)
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
        self._starts = [size(each) for each in logs]
        self._heard = list(self._starts)
        self._log_start = size(log)
        for each in logs:
            each.parent.mkdir(parents=True, exist_ok=True)
        self._srun = Child(f"srun of {name}", command, log, environment)

    def status(self) -> int | None:
        """Return the exit status of srun, which is the highest of its tasks'."""
        return self._srun.status()

    def send(self, number: signal.Signals) -> None:
        """Signal every task. srun forwards SIGUSR1; on SIGTERM it kills the step."""
        passed = {signal.SIGTERM: signal.SIGUSR1, signal.SIGKILL: signal.SIGTERM}
        self._srun.send(passed.get(number, number), alone=True)

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
            if size(log) <= self._heard[index]:
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
        mark = "srun: error: "
        lines = log_lines(self.log, self._log_start) if self.log.exists() else []
        errors = [line.removeprefix(mark) for line in lines if line.startswith(mark)]
        for cause in ("Node failure", CONTROLLER_AWAY):
            if lost := [line for line in errors if cause in line]:
                return ProcessFailure(lost[0], self.log, lost=True)
        endings = {task: how for line in errors for task, how in _ending(line)}
        order = [*endings, *range(len(self._logs))]

        def of_task(task: int) -> ProcessFailure:
            name = self.name if len(self._logs) == 1 else f"{self.name} {task}"
            how = endings.get(task, "was ended")
            killed = not how.endswith(OWN_ERRORS)
            return failure_from_log(f"{name} {how}", killed, self._logs[task], self._starts[task])

        def doubt(failure: ProcessFailure) -> tuple[bool, bool, int]:
            position = order.index(self._logs.index(failure.log))
            return not failure.stated, lost_another(failure.tail), position

        failures = [of_task(task) for task, log in enumerate(self._logs) if log.exists()]
        return min(failures, key=doubt) if failures else self._srun.failure()


def _ending(line: str) -> list[tuple[int, str]]:
    """Return (task, how it ended) from a line such as `n2: tasks 1,3: Exited with exit code 1`."""
    found = TASKS_ENDED.fullmatch(line)
    if not found:
        return []
    node, tasks, how = found.groups()
    ranges = (part.partition("-") for part in tasks.split(","))  # such as 0-2,5
    return [
        (task, f"on {node}: {how}")
        for first, _, last in ranges
        for task in range(int(first), int(last or first) + 1)
    ]


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
