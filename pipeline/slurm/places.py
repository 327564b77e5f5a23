"""The nodes and GPUs of a stage's ranks and engines in its Slurm job, and sbatch's options."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parallel.errors import UserError
from parallel.machine.slots import check_engine_size, engine_slots, nodes_needed
from parallel.settings import EngineSettings, LayoutSettings
from pipeline.config.cluster import ClusterSettings

SLOTS_OF_A_NODE = "the cluster's ranks_per_node"


class PlacedEngine(NamedTuple):
    """The nodes of an engine, and its slots on each of them."""

    nodes: list[str]
    slots: list[int]


@dataclass(frozen=True)
class Places:
    """The nodes of the ranks, filled one after another, and every engine's place."""

    rank_nodes: list[str]
    ranks_per_node: int
    engines: list[PlacedEngine]

    @property
    def nodes(self) -> list[str]:
        """All nodes with a process of the stage."""
        engines = [node for engine in self.engines for node in engine.nodes]
        return list(dict.fromkeys([*self.rank_nodes, *engines]))


def size_options(
    layout: LayoutSettings, engine: EngineSettings | None, cluster: ClusterSettings
) -> list[str]:
    """Return sbatch's options for the nodes of a stage and their share.

    `engine` is None for a stage without sampling.
    """
    options = [
        f"--nodes={nodes_needed(layout, engine, cluster.ranks_per_node)}",
        f"--ntasks-per-node={cluster.ranks_per_node}",
        f"--cpus-per-task={cluster.cpus_per_rank}",
    ]
    if cluster.gpus_per_node and cluster.gres:
        of_type = f"{cluster.gpu_type}:" if cluster.gpu_type else ""
        options.append(f"--gpus-per-node={of_type}{cluster.gpus_per_node}")
    return options


def cpus_of(text: str) -> list[int]:
    """Return a job's CPUs on each node, from `SLURM_JOB_CPUS_PER_NODE`, such as `64(x2),32`."""
    cpus: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        cpus += [int(count)] * int(times or 1)
    return cpus


def too_few_cpus(
    places: Places, ranks: int, nodes: Sequence[str], cpus: Sequence[int], cpus_per_rank: int
) -> tuple[str, int, int] | None:
    """Return a node with fewer CPUs than srun needs there, and both numbers; None if all suffice.

    The ranks are one step and each engine is another; steps overlap.
    """
    # Without SLURM_JOB_CPUS_PER_NODE there are no CPUs to compare with.
    for node, has in zip(nodes, cpus, strict=False):
        before = places.ranks_per_node * nodes.index(node)  # ranks on the nodes before this one
        on_node = min(ranks - before, places.ranks_per_node)
        engines = [len(engine.slots) for engine in places.engines if node in engine.nodes]
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

    Raises:
        UserError: there are too few nodes, or no number of whole nodes holds an engine.
    """
    per_node, sampling = cluster.ranks_per_node, engine if samples else None
    if samples:
        check_engine_size(engine, per_node, SLOTS_OF_A_NODE)
    needed = nodes_needed(layout, sampling, per_node)
    if len(nodes) < needed:
        raise UserError(
            f"this job has {len(nodes)} of the {needed} nodes that layout.ranks = {layout.ranks} "
            f"and the engines need at ranks_per_node = {per_node}; submit it with "
            f"{' '.join(size_options(layout, sampling, cluster))}"
        )
    engines = [
        PlacedEngine([nodes[node] for node in engine_place.nodes], list(engine_place.slots))
        for engine_place in (engine_slots(layout, engine, per_node) if samples else ())
    ]
    return Places(list(nodes[: -(-layout.ranks // per_node)]), per_node, engines)


def check_reachable(address: str, nodes: Sequence[str]) -> None:
    """Raise UserError where the first of several nodes has its loopback address by its own name.

    Debian's /etc/hosts gives it 127.0.1.1: every other node would connect to itself, and wait.
    """
    if len(nodes) > 1 and address.startswith("127."):
        raise UserError(
            f"network_interface: null: the name of {nodes[0]} means {address} there, which the "
            f"other {len(nodes) - 1} nodes cannot reach; in the cluster's profile, name an "
            "interface of a network that all nodes share, such as network_interface: ib0 "
            "(`ip -brief address` lists them), and submit with --cluster FILE: without it, the "
            "profile of the last submission is used again"
        )
