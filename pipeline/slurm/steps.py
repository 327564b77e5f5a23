"""The ranks and engines of a stage on the nodes of its Slurm job, as steps (srun) of it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from parallel.engine.platform import process_environment
from parallel.errors import NOTICE_MARK, STATUS_DESCRIPTOR, UserError
from parallel.machine.gpus import hidden_gpus
from parallel.machine.network import address_of, environment_of, free_port
from parallel.machine.on_gpus import RANK
from pipeline.config.cluster import ClusterSettings, ContainerSettings
from pipeline.launch.placement import on_gpus
from pipeline.launch.processes import (
    POLL_SECONDS,
    Child,
    Process,
    ProcessFailure,
    failure_from_log,
    log_lines,
    lost_another,
    size,
    wait_for_all,
)
from pipeline.slurm.places import Places, check_reachable
from stages.data.reasoning_gym_options import HASH_SEED

END_SECONDS = 15.0  # how long Slurm may take to end a step before its srun is killed
TASKS_ENDED = re.compile(r"(\S+): tasks? ([\d,-]+): (.+)")
CONTROLLER_AWAY = "Unable to contact slurm controller"
# Endings that the program itself caused; any other, such as a signal, may mean a lost node.
OWN_ERRORS = (*(f"exit code {code}" for code in range(1, 128)), "Out Of Memory")


class SlurmJob:
    """A placement that starts steps on the nodes of this job."""

    def __init__(self, places: Places, cluster: ClusterSettings) -> None:
        self.interface = cluster.network_interface or ""
        self.nodes_per_engine = max((len(engine.nodes) for engine in places.engines), default=1)
        self.on_gpus = cluster.gpus_per_node > 0
        self._places = places
        self._cluster = cluster
        self._container = cluster.container
        if self._container and self.on_gpus and (local := cluster.local_directory):
            mounts = (*self._container.mounts, f"{local}:{local}")
            self._container = self._container.model_copy(update={"mounts": mounts})

    def prepare(self, log: Path, check: Callable[[], None]) -> None:
        """Check the network, and unpack pyxis' image on every node, before any other step.

        All later steps enter that one root. Two steps that start at once would both unpack the
        image, and one would find the other's files. `check` is called while this waits, and may
        raise.

        Raises:
            UserError: a node cannot be reached, or the image cannot be unpacked.
        """
        if not self.interface:
            check_reachable(address_of(self.interface), self._places.nodes)
        container = self._container
        if container is None or container.runtime != "pyxis":
            return
        nodes = self._places.nodes
        options = [f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}", "--ntasks-per-node=1"]
        image = f"--container-image={container.image}"
        command = [*self._srun(options), image, *pyxis_options(container), "true"]
        step = Step("container", command, log, [], {})
        try:
            while step.status() is None:
                check()
                wait_for_all([step], POLL_SECONDS)
            if step.status():
                failure = step.failure()
                cause = f"container.image: {container.image}: {failure.cause}"
                raise UserError("\n".join([cause, *failure.tail]))
        finally:
            step.reap()

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
        return [self._step("rank", options, RANK, command, directory, logs, rendezvous)]

    def start_engine(self, name: str, index: int, command: Sequence[str], log: Path) -> Process:
        place = self._places.engines[index]
        options = [
            f"--nodes={len(place.nodes)}",
            f"--nodelist={','.join(place.nodes)}",
            f"--ntasks={len(place.nodes)}",
            "--ntasks-per-node=1",
            f"--cpus-per-task={len(place.slots) * self._cluster.cpus_per_rank}",
            f"--output={log.absolute()}",
        ]
        if len(place.nodes) > 1:
            options.append("--kill-on-bad-exit=1")  # vLLM cannot replace one of its nodes
        environment = process_environment(self.on_gpus) | environment_of(self.interface)
        slots = ",".join(map(str, place.slots))
        return self._step(name, options, slots, command, log.parent, [log], environment)

    def _step(
        self,
        name: str,
        options: Sequence[str],
        slots: str,
        command: Sequence[str],
        directory: Path,
        logs: Sequence[Path],
        environment: Mapping[str, str],
    ) -> Step:
        """Start a step of tasks that run a Python command; with GPUs, on these slots of them."""
        if self.on_gpus:
            caches = local_caches(self._cluster.local_directory)
            command = on_gpus(command, slots, caches)
        else:
            environment = {**hidden_gpus(), **environment}
        container = self._container
        names = [*environment, *passed_on(os.environ)]
        if container is not None and container.runtime == "apptainer":
            # Apptainer passes the environment on, but an image's own values come before it.
            values = {**os.environ, **environment}
            environment = {**environment, **{f"APPTAINERENV_{key}": values[key] for key in names}}
        inside = contained(container, command, names)
        return Step(
            name, [*self._srun(options), *inside], directory / "srun.log", logs, environment
        )

    def _srun(self, options: Sequence[str]) -> list[str]:
        shared = [
            "--overlap",  # ranks and engines share cores and devices in turn
            "--mem=0",
            # Slurm would bind the first task of every overlapping step to the same cores; on GPUs
            # `parallel.machine.on_gpus` binds each process near its own.
            "--cpu-bind=none",
            "--open-mode=append",
            "--export=ALL",
        ]
        # The status pipe does not reach another node; messages are read from the log instead.
        return ["env", f"--unset={STATUS_DESCRIPTOR}", "srun", *shared, *options]


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
        self._starts = [size(task_log) for task_log in logs]
        self._heard = list(self._starts)
        self._log_start = size(log)
        for task_log in logs:
            task_log.parent.mkdir(parents=True, exist_ok=True)
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
        notice_lines = []
        for index, log in enumerate(self._logs):
            if size(log) <= self._heard[index]:
                continue
            with log.open("rb") as file:
                file.seek(self._heard[index])
                whole, newline, _ = file.read().rpartition(b"\n")
            self._heard[index] += len(whole) + len(newline)
            lines = whole.decode(errors="replace").splitlines()
            notice_lines += [line for line in lines if line.startswith(NOTICE_MARK)]
        return [line.removeprefix(NOTICE_MARK) for line in notice_lines]

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
            # All tasks of an engine, one on each of its nodes, write one log.
            shared_endings = endings.values() if len(self._logs) == 1 else ()
            how = endings.get(task, next(iter(shared_endings), "was ended"))
            killed = not how.endswith(OWN_ERRORS)
            return failure_from_log(f"{name} {how}", killed, self._logs[task], self._starts[task])

        def doubt(failure: ProcessFailure) -> tuple[bool, bool, int]:
            position = order.index(self._logs.index(failure.log))
            return not failure.stated, lost_another(failure.tail), position

        failures = [of_task(task) for task, log in enumerate(self._logs) if log.exists()]
        return min(failures, key=doubt) if failures else self._srun.failure()


def _ending(line: str) -> list[tuple[int, str]]:
    """Return (task, how it ended) from a line such as `n2: tasks 1,3: Exited with exit code 1`."""
    match = TASKS_ENDED.fullmatch(line)
    if not match:
        return []
    node, tasks, how = match.groups()
    ranges = (task_range.partition("-") for task_range in tasks.split(","))  # such as 0-2,5
    return [
        (task, f"on {node}: {how}")
        for low, _, high in ranges
        for task in range(int(low), int(high or low) + 1)
    ]


def local_caches(directory: str | None) -> str:
    """Return this user's directory of compiled kernels on each node; "" for the programs' own."""
    return f"{directory}/braid-{os.getuid()}" if directory else ""


def passed_on(environment: Mapping[str, str]) -> list[str]:
    """Return the names of variables that must reach a container although its image has values.

    NCCL's are a cluster's, set in `setup`; NCCL_VERSION is the image's. Some domains draw their
    problems by the hash seed.
    """
    nccl = {name for name in environment if name.startswith("NCCL_")} - {"NCCL_VERSION"}
    return sorted(nccl | ({HASH_SEED} & environment.keys()))


def contained(
    container: ContainerSettings | None, command: Sequence[str], names: Sequence[str] = ()
) -> list[str]:
    """Return the command inside the container's image; for pyxis, with srun's options before it.

    The image's own values of the variables `names` do not count.
    """
    if container is None:
        return list(command)
    inside = [container.python, *command[1:]]
    if container.runtime == "pyxis":
        passed = [f"--container-env={','.join(names)}"] if names else []
        return [*pyxis_options(container), *passed, *inside]
    home = [] if container.mount_home else ["--no-home"]
    binds = [option for mount in container.mounts for option in ("--bind", mount)]
    start = ["apptainer", "exec", "--nv", *home, *binds, "--pwd", str(Path.cwd())]
    return [*start, container.image, *inside]


def pyxis_options(container: ContainerSettings) -> list[str]:
    """Return srun's options that enter the job's container root, which `prepare` unpacked.

    Without a name every step would unpack the image again, 20 to 40 GB each, on every node. A
    step must not attach to a running container (`no_exec`, pyxis 0.14): steps start at once, and
    the process that one attaches to may end before its namespaces are joined.
    """
    job = os.environ.get("SLURM_JOB_ID", "")
    mounts = [f"--container-mounts={','.join(container.mounts)}"] if container.mounts else []
    home = "--container-mount-home" if container.mount_home else "--no-container-mount-home"
    return [
        f"--container-name=braid-{job}:no_exec",
        home,
        *mounts,
        f"--container-workdir={Path.cwd()}",
    ]
