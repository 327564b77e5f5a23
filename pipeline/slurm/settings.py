"""What a person says of a cluster: `configs/clusters/*.yaml`. None of it changes a result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from parallel.settings import Positive, Settings

Walltime = Annotated[str, Field(pattern=r"^(\d+-)?\d+(:\d\d){0,2}$")]  # as sbatch --time takes it
StageKind = Literal["import", "sft", "grpo", "mixed", "distill", "gate", "evaluate", "export"]


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


class ContainerSettings(Settings):
    """The image that ranks and engines run in; the launcher itself runs outside, beside srun."""

    runtime: Literal["pyxis", "apptainer"]
    image: str
    mounts: tuple[str, ...] = Field(
        default=(), description="HOST:CONTAINER; the run's folder has to be seen under its own path"
    )
    python: str = Field(default="python3", description="the interpreter in there that has braid")


class ClusterSettings(Settings):
    """How stages become jobs of Slurm's."""

    account: str | None = None
    partition: str | None = None
    options: tuple[str, ...] = Field(
        default=(), description="further options of sbatch, such as --exclusive or --qos=high"
    )
    ranks_per_node: Positive = Field(
        default=8, description="ranks, of the trainer and of engines, that a node has room for"
    )
    gpus_per_node: Annotated[int, Field(ge=0)] = Field(
        default=0, description="0 asks for none: ranks and engines then run on the CPU"
    )
    cpus_per_rank: Positive = 1
    walltime: Walltime = Field(
        default="4:00:00", description="a longer stage saves, goes back into the queue, continues"
    )
    walltimes: dict[StageKind, Walltime] = Field(
        default_factory=dict, description="of kinds of stages that need another"
    )
    warning_seconds: Annotated[int, Field(ge=60)] = Field(
        default=300, description="before the walltime ends, to save in; Slurm may be 60 s early"
    )
    restarts: Annotated[int, Field(ge=0)] = Field(
        default=3,
        description="how often a stage may start from the same step again, after a failure that"
        " nothing explains, a lost node or too short a walltime",
    )
    experts_at_once: Positive | None = Field(
        default=None, description="of an array of experts; null is as many as Slurm has room for"
    )
    network_interface: str | None = Field(
        default=None,
        description="where ranks and engines listen; null is the one the host's name resolves to",
    )
    setup: tuple[str, ...] = Field(
        default=(), description="lines of shell before a stage: modules, an environment"
    )
    container: ContainerSettings | None = None


def too_short(cluster: ClusterSettings) -> Iterator[tuple[str, str]]:
    """Every walltime that has no room for the warning before its end: (dotted key, message)."""
    others = [(f"walltimes.{kind}", walltime) for kind, walltime in cluster.walltimes.items()]
    for key, walltime in [("walltime", cluster.walltime), *others]:
        if 0 < seconds_of(walltime) <= cluster.warning_seconds:
            yield key, f"{walltime} should be more than warning_seconds = {cluster.warning_seconds}"
