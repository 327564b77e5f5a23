"""The schema of a cluster profile, `configs/clusters/*.yaml`. No setting in it changes a result."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from parallel.settings import Count, Natural, Settings
from stages.kinds import Kind

WALLTIME = re.compile(r"(\d+-)?\d+(:\d\d){0,2}")  # the form of sbatch --time
MOST_WARNING_SECONDS = 65_535  # the limit of sbatch --signal
MOST_GIBIBYTES = 1000  # no GPU has more; MiB are thousands
FORMS = '"D-HH:MM:SS", "HH:MM:SS" or "MINUTES"'
# Keys that a job reads from its profile at every start; the others are options of sbatch.
READ_BY_JOBS = (
    *("ranks_per_node", "gpus_per_node", "cpus_per_rank", "warning_seconds", "restarts"),
    *("gres", "network_interface", "local_directory", "setup", "container"),
)
# Options of sbatch that Braid sets on every job, and what to use instead.
_OWN = {
    ("-a", "--array"): "see array_task_throttle",
    ("-d", "--dependency", "--kill-on-invalid-dep"): "dependencies follow the run's graph",
    ("--comment",): "it records a job's run and stage",
    ("-J", "--job-name"): "a job is named after its run and stage",
    ("-o", "--output", "-e", "--error", "--open-mode"): "`braid logs` reads a job's output",
    ("--signal",): "see warning_seconds",
    ("-t", "--time"): "see walltime",
    ("-N", "--nodes", "-n", "--ntasks", "--ntasks-per-node"): "see ranks_per_node",
    ("-c", "--cpus-per-task"): "see cpus_per_rank",
    ("--gpus-per-node",): "see gpus_per_node",
    ("-M", "--clusters"): "jobs go to the cluster of slurm.conf, where squeue finds them",
    ("--requeue", "--no-requeue"): "Braid requeues a job that stops early",
    ("--parsable", "--test-only", "--wrap", "-W", "--wait"): "stage scripts are submitted as is",
}
OWN_OPTIONS = {name: instead for names, instead in _OWN.items() for name in names}


def seconds_of(walltime: str) -> int:
    """Return a walltime in seconds, read like sbatch --time; 0 is no limit.

    Its forms are `M`, `M:S`, `H:M:S`, `D-H`, `D-H:M` and `D-H:M:S`.
    """
    days, dash, clock = walltime.rpartition("-")
    numbers = [int(number) for number in clock.split(":")]
    # After `D-` the first number is hours; without it, the first of two is minutes.
    if dash:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _walltime(value: Any) -> Any:
    """Reject a number: sbatch reads 90 as minutes, and a person may mean seconds."""
    if type(value) in (int, float):
        message = f"must be text: {FORMS}"
        raise PydanticCustomError("walltime", message)
    if isinstance(value, str) and not WALLTIME.fullmatch(value):
        raise PydanticCustomError("walltime", f"must be {FORMS}")
    return value


def _option(value: str) -> str:
    """Reject options that Braid sets: sbatch takes the last one given, and would override it."""
    option = value.strip()
    name = option[:2] if option[1:2] != "-" else re.split(r"[=\s]", option)[0]
    for reserved, instead in OWN_OPTIONS.items():
        # sbatch accepts abbreviations: a prefix selects the option unless it is an option itself.
        if name == reserved or (len(name) > 3 and reserved.startswith(name) and name != "--gpus"):
            raise PydanticCustomError("option", f"{reserved} is set by Braid; {instead}")
    return value


def _gibibytes(value: Any) -> Any:
    """Reject the MiB that nvidia-smi prints."""
    if type(value) in (int, float) and value > MOST_GIBIBYTES:
        message = "should be in GiB, {gibibytes} for nvidia-smi's {value} MiB"
        shown = {"gibibytes": f"{value / 1024:.1f}", "value": f"{value:g}"}
        raise PydanticCustomError("gibibytes", message, shown)
    return value


Walltime = Annotated[str, BeforeValidator(_walltime)]
GpuMemory = Annotated[float, BeforeValidator(_gibibytes), Field(gt=0, le=MOST_GIBIBYTES)]
Option = Annotated[str, AfterValidator(_option)]


class ContainerSettings(Settings):
    """The image that ranks and engines run in; the launcher runs on the host, next to srun."""

    runtime: Literal["pyxis", "apptainer"] = Field(description="what starts the container")
    image: str = Field(description="path or name of the image")
    mounts: tuple[str, ...] = Field(
        default=(), description="HOST:CONTAINER; the run directory must keep its host path"
    )
    python: str = Field(default="python3", description="the image's interpreter that has braid")
    mount_home: bool = Field(
        default=False,
        description="mount the home directory: its ~/.local comes before the image's packages",
    )


class KindSettings(Settings):
    """Overrides of the profile for stages of one kind; null overrides nothing."""

    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    memory_per_node: str | None = None
    options: tuple[Option, ...] = Field(
        default=(), description="sbatch options, after the profile's: the last one takes effect"
    )
    ranks_per_node: Count | None = None
    gpus_per_node: Natural | None = None
    gpu_type: str | None = None
    gpu_memory_gib: GpuMemory | None = None
    cpus_per_rank: Count | None = None
    walltime: Walltime | None = None


class ClusterSettings(Settings):
    """The profile of a cluster: the resources of a stage's Slurm job."""

    renamed: ClassVar[dict[str, str]] = {
        "walltimes": "kinds: {KIND: {walltime: ...}}",
        "experts_at_once": "array_task_throttle",
    }

    account: str | None = Field(default=None, description="sbatch --account")
    partition: str | None = Field(default=None, description="sbatch --partition")
    qos: str | None = Field(default=None, description="sbatch --qos")
    constraint: str | None = Field(default=None, description="node features, such as a100|h100")
    memory_per_node: str | None = Field(
        default=None,
        description='sbatch --mem: "900G"; "0" is all memory, null the cluster\'s default',
    )
    options: tuple[Option, ...] = Field(
        default=(), description="further options of sbatch, such as --exclusive"
    )
    ranks_per_node: Count = Field(default=8, description="trainer and engine ranks per node")
    gpus_per_node: Natural = Field(default=0, description="0: ranks and engines run on the CPU")
    gpu_type: str | None = Field(default=None, description="such as h100; null is any")
    gres: bool = Field(
        default=True,
        description="false: Slurm does not manage the GPUs; jobs take whole nodes and request none",
    )
    gpu_memory_gib: GpuMemory | None = Field(
        default=None,
        description="usable memory of a GPU in GiB, nvidia-smi's memory.total without "
        "memory.reserved: 79.2 of an H100 of 80 GB; "
        "stages that need more are refused before a job is queued; null refuses none",
    )
    cpus_per_rank: Count = Field(default=1, description="CPU cores of each rank")
    walltime: Walltime = Field(
        default="4:00:00",
        description='"D-HH:MM:SS", "HH:MM:SS" or "MINUTES"; longer stages are requeued',
    )
    kinds: dict[Kind, KindSettings] = Field(
        default_factory=dict, description="overrides for stages of a kind"
    )
    warning_seconds: Annotated[int, Field(ge=60, le=MOST_WARNING_SECONDS)] = Field(
        default=300,
        description="time to checkpoint in before the walltime; Slurm may be 60 s early",
    )
    restarts: Natural = Field(
        default=3,
        description="restarts of a stage from the same step, after an unexplained failure, a lost"
        " node or too short a walltime",
    )
    array_task_throttle: Count | None = Field(
        default=None,
        description="maximum tasks of an array in parallel, such as the stages of a block with"
        " for_each; null is Slurm's limit",
    )
    network_interface: str | None = Field(
        default=None,
        description="on which ranks and engines listen; null is the host name's",
    )
    local_directory: str | None = Field(
        default="/tmp",
        description="on each node's own disk: compiled GPU kernels; null keeps them in the home",
    )
    setup: tuple[str, ...] = Field(
        default=(), description="shell lines to run before a stage: modules, an environment"
    )
    container: ContainerSettings | None = Field(default=None, description="null runs on the host")

    def of_kind(self, kind: Kind) -> ClusterSettings:
        """Return the profile with the overrides for stages of a kind applied."""
        if (overrides := self.kinds.get(kind)) is None:
            return self
        changed = {
            name: value for name, value in overrides if value is not None and name != "options"
        }
        return self.model_copy(update={**changed, "options": (*self.options, *overrides.options)})


def violations(cluster: ClusterSettings) -> Iterator[tuple[str, str]]:
    """Yield every rule between the keys that the profile breaks, as (dotted key, message)."""
    yield from _too_short(cluster)
    yield from _too_few_gpus(cluster, "ranks_per_node")
    for kind, overrides in cluster.kinds.items():
        if {"ranks_per_node", "gpus_per_node"} & overrides.model_fields_set:
            yield from _too_few_gpus(cluster.of_kind(kind), f"kinds.{kind}.ranks_per_node")
    if cluster.local_directory is not None and not cluster.local_directory.startswith("/"):
        yield "local_directory", f"{cluster.local_directory} must be an absolute path"
    if cluster.network_interface == "":
        yield "network_interface", "must be a name, such as ib0; null is the host name's interface"
    if cluster.gres or not cluster.gpus_per_node:
        return
    if "--exclusive" not in map(str.strip, cluster.options):
        yield (
            "gres",
            "false needs options: [--exclusive], since Slurm would give the same GPUs to several "
            "jobs",
        )
    if cluster.gpu_type:
        yield "gpu_type", f"{cluster.gpu_type} cannot be requested with gres: false; use constraint"


def _too_few_gpus(cluster: ClusterSettings, key: str) -> Iterator[tuple[str, str]]:
    """Check that every rank of a node has its own GPU: NCCL refuses two on one."""
    gpus, ranks = cluster.gpus_per_node, cluster.ranks_per_node
    if 0 < gpus < ranks:
        yield (
            key,
            f"{ranks} ranks need {ranks} GPUs, and gpus_per_node = {gpus}; lower it to {gpus} or "
            "less",
        )


def _too_short(cluster: ClusterSettings) -> Iterator[tuple[str, str]]:
    """Yield every walltime that is shorter than the warning, as (dotted key, message)."""
    of_kinds = [
        (f"kinds.{kind}.walltime", overrides.walltime) for kind, overrides in cluster.kinds.items()
    ]
    for key, walltime in [("walltime", cluster.walltime), *of_kinds]:
        if walltime is not None and 0 < seconds_of(walltime) <= cluster.warning_seconds:
            yield key, f"{walltime} must be more than warning_seconds = {cluster.warning_seconds}"
