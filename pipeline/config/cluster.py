"""What a person says of a cluster: `configs/clusters/*.yaml`. None of it changes a result."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from parallel.settings import Count, Natural, Settings
from stages.kinds import Kind

WALLTIME = re.compile(r"(\d+-)?\d+(:\d\d){0,2}")  # as sbatch --time takes it
MOST_WARNING_SECONDS = 65_535  # that sbatch --signal takes
FORMS = '"D-HH:MM:SS", "HH:MM:SS" or "MINUTES"'
# What a job reads of its profile when it begins, each time anew; the rest is said to sbatch.
READ_BY_JOBS = (
    *("ranks_per_node", "gpus_per_node", "cpus_per_rank", "warning_seconds", "restarts"),
    *("network_interface", "setup", "container"),
)
# Options of sbatch that Braid gives every job, and where a person says something of the same.
_OWN = {
    ("-a", "--array"): "see experts_at_once",
    ("-d", "--dependency", "--kill-on-invalid-dep"): "what waits for what is the run's `from`",
    ("--comment",): "it records a job's run and stage",
    ("-J", "--job-name"): "a job is named after its run and stage",
    ("-o", "--output", "-e", "--error", "--open-mode"): "`braid logs` reads what a job prints",
    ("--signal",): "see warning_seconds",
    ("-t", "--time"): "see walltime",
    ("-N", "--nodes", "-n", "--ntasks", "--ntasks-per-node"): "see ranks_per_node",
    ("-c", "--cpus-per-task"): "see cpus_per_rank",
    ("--gpus-per-node",): "see gpus_per_node",
    ("--requeue", "--no-requeue"): "a job that stops early goes back into the queue",
    ("--parsable", "--test-only", "--wrap", "-W", "--wait"): "a stage script is submitted as it is",
}
OWN_OPTIONS = {name: instead for names, instead in _OWN.items() for name in names}


def seconds_of(walltime: str) -> int:
    """What sbatch makes of it: `M`, `M:S`, `H:M:S`, `D-H`, `D-H:M` or `D-H:M:S`; 0 is no limit."""
    days, dash, rest = walltime.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _walltime(value: Any) -> Any:
    """Refuse a number: sbatch takes 90 for minutes, and a reader may take it for seconds."""
    if type(value) in (int, float):
        message = f"should be text: {FORMS}"
        raise PydanticCustomError("walltime", message)
    if isinstance(value, str) and not WALLTIME.fullmatch(value):
        raise PydanticCustomError("walltime", f"should be {FORMS}")
    return value


def _option(value: str) -> str:
    """The last of an option counts, so that these would undo what Braid says of a job."""
    given = value.strip()
    name = given[:2] if given[1:2] != "-" else re.split(r"[=\s]", given)[0]
    for own, instead in OWN_OPTIONS.items():
        # sbatch takes the beginning of a name for the whole of it, unless it is a name itself.
        if name == own or (len(name) > 3 and own.startswith(name) and name != "--gpus"):
            raise PydanticCustomError("option", f"{own} is Braid's own to give; {instead}")
    return value


Walltime = Annotated[str, BeforeValidator(_walltime)]
Option = Annotated[str, AfterValidator(_option)]


class ContainerSettings(Settings):
    """The image that ranks and engines run in; the launcher itself runs outside, beside srun."""

    runtime: Literal["pyxis", "apptainer"] = Field(description="what starts the container")
    image: str = Field(description="path or name of the image")
    mounts: tuple[str, ...] = Field(
        default=(), description="HOST:CONTAINER; the run's folder has to be seen under its own path"
    )
    python: str = Field(default="python3", description="the interpreter in there that has braid")


class KindSettings(Settings):
    """What stages of a kind ask for otherwise; null is what the others ask for."""

    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    memory_per_node: str | None = None
    options: tuple[Option, ...] = Field(
        default=(), description="of sbatch, behind those of every stage: the last one counts"
    )
    ranks_per_node: Count | None = None
    gpus_per_node: Natural | None = None
    gpu_type: str | None = None
    cpus_per_rank: Count | None = None
    walltime: Walltime | None = None


class ClusterSettings(Settings):
    """How stages become jobs of Slurm's."""

    renamed: ClassVar[dict[str, str]] = {"walltimes": "kinds: {KIND: {walltime: ...}}"}

    account: str | None = Field(default=None, description="sbatch --account")
    partition: str | None = Field(default=None, description="sbatch --partition")
    qos: str | None = Field(default=None, description="sbatch --qos")
    constraint: str | None = Field(default=None, description="features of nodes, such as a100|h100")
    memory_per_node: str | None = Field(
        default=None,
        description='as sbatch --mem: "900G"; "0" is all of it, null the cluster\'s own',
    )
    options: tuple[Option, ...] = Field(
        default=(), description="further options of sbatch, such as --exclusive"
    )
    ranks_per_node: Count = Field(
        default=8, description="ranks, of the trainer and of engines, that a node has room for"
    )
    gpus_per_node: Natural = Field(
        default=0, description="0 asks for none: ranks and engines then run on the CPU"
    )
    gpu_type: str | None = Field(default=None, description="such as h100; null is any")
    cpus_per_rank: Count = Field(default=1, description="CPU cores of each rank")
    walltime: Walltime = Field(
        default="4:00:00",
        description='"D-HH:MM:SS", "HH:MM:SS" or "MINUTES"; a longer stage saves and is requeued',
    )
    kinds: dict[Kind, KindSettings] = Field(
        default_factory=dict, description="of stages what they ask for otherwise"
    )
    warning_seconds: Annotated[int, Field(ge=60, le=MOST_WARNING_SECONDS)] = Field(
        default=300, description="before the walltime ends, to save in; Slurm may be 60 s early"
    )
    restarts: Natural = Field(
        default=3,
        description="how often a stage may start from the same step again, after a failure that"
        " nothing explains, a lost node or too short a walltime",
    )
    experts_at_once: Count | None = Field(
        default=None, description="of an array of experts; null is as many as Slurm has room for"
    )
    network_interface: str | None = Field(
        default=None,
        description="where ranks and engines listen; null is the one the host's name resolves to",
    )
    setup: tuple[str, ...] = Field(
        default=(), description="lines of shell before a stage: modules, an environment"
    )
    container: ContainerSettings | None = Field(default=None, description="null runs on the host")

    def of_kind(self, kind: Kind) -> ClusterSettings:
        """What stages of a kind go by: this, with what is said of the kind laid over it."""
        if (own := self.kinds.get(kind)) is None:
            return self
        said = {name: value for name, value in own if value is not None and name != "options"}
        return self.model_copy(update={**said, "options": (*self.options, *own.options)})


def too_short(cluster: ClusterSettings) -> Iterator[tuple[str, str]]:
    """Every walltime that has no room for the warning before its end: (dotted key, message)."""
    others = [(f"kinds.{kind}.walltime", own.walltime) for kind, own in cluster.kinds.items()]
    for key, walltime in [("walltime", cluster.walltime), *others]:
        if walltime is not None and 0 < seconds_of(walltime) <= cluster.warning_seconds:
            yield key, f"{walltime} should be more than warning_seconds = {cluster.warning_seconds}"
