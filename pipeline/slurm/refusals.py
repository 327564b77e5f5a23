"""Which keys of a cluster's profile sbatch speaks of when it refuses a job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from pipeline.config.cluster import ClusterSettings
from pipeline.config.validate import place_in_cluster
from pipeline.config.violations import shown
from pipeline.slurm.queue import SlurmError
from stages.kinds import Kind

GPUS = ("gpus_per_node", "gpu_type")
NODE = ("ranks_per_node", "cpus_per_rank", *GPUS, "memory_per_node", "constraint", "partition")
# What sbatch says, in lower case (slurm_errno.c and its own options), and the keys that it means.
# All that are found in an answer count.
REFUSALS = {
    "invalid partition": ("partition",),
    "invalid account": ("account", "partition"),
    "invalid qos": ("qos",),
    "invalid generic resource": GPUS,
    "invalid gres": GPUS,
    "invalid gpu": GPUS,
    "invalid trackable resource": GPUS,
    "invalid --gpus-per-node": GPUS,
    "invalid feature": ("constraint",),
    "requested time limit": ("walltime",),
    "invalid --time": ("walltime",),
    "invalid --signal": ("warning_seconds",),
    "memory specification": ("memory_per_node",),
    "memory required by task": ("memory_per_node",),
    "invalid --mem": ("memory_per_node",),
    "requested node configuration is not available": NODE,
    "node count specification": ("ranks_per_node", "partition"),
    "more processors requested": ("ranks_per_node", "cpus_per_rank", "partition"),
    "violates accounting/qos policy": ("qos", "account", "walltime", *GPUS, "cpus_per_rank"),
    "not permitted to use": ("partition", "account", "qos"),
    "access/permission denied": ("partition", "account", "qos"),
    "invalid --begin": ("options",),
    "reservation": ("options",),
    "unrecognized option": ("options",),
    "invalid option": ("options",),
    "requires an argument": ("options",),
}


def explained(error: SlurmError, kind: Kind, cluster: ClusterSettings, profile: Path) -> SlurmError:
    """The refusal of a job for stages of this kind, with what `profile` says of it."""
    said = str(error).lower()
    keys = [key for words, keys in REFUSALS.items() if words in said for key in keys]
    lines = [_line(key, kind, cluster, profile) for key in dict.fromkeys(keys)]
    if not lines:
        return error
    heading = "what it was asked for is said by the cluster's profile:"
    return SlurmError("\n  ".join([f"{error}\n{heading}", *lines]))


def _line(key: str, kind: Kind, cluster: ClusterSettings, profile: Path) -> str:
    *_, (where, value) = _sayings(key, kind, cluster)
    if value in (None, ()):
        return f"{shown(profile)}: {where}: is not set"
    text = list(value) if isinstance(value, tuple) else value
    place = place_in_cluster(profile, tuple(where.split(".")))
    return f"{place}: {where}: {json.dumps(text)}"


def _sayings(
    key: str, kind: Kind, cluster: ClusterSettings
) -> Iterator[tuple[str, str | int | tuple[str, ...] | None]]:
    """The dotted key and the value of every place that says it, the one that counts last."""
    yield key, getattr(cluster, key)
    own = getattr(cluster.kinds.get(kind), key, None)  # some keys are of all stages alike
    if own not in (None, ()):
        yield f"kinds.{kind}.{key}", own
