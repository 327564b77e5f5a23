"""Which nodes of a job the ranks and the engines of a stage run on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from parallel.settings import EngineSettings, LayoutSettings
from pipeline.config.cluster import ClusterSettings
from pipeline.errors import BraidError


@dataclass(frozen=True)
class Places:
    """The nodes of the ranks, which fill one after another, and of every engine its node and the
    numbers of its devices there."""

    rank_nodes: list[str]
    ranks_per_node: int
    engines: list[tuple[str, list[int]]]


def nodes_needed(
    layout: LayoutSettings, engine: EngineSettings | None, cluster: ClusterSettings
) -> int:
    """How many nodes a stage takes; `engine` is None for one that does not sample."""
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
    """Return the options of sbatch that say how many nodes a stage takes and how much of each;
    `engine` is None for one that does not sample."""
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
    """Return the CPUs that a job has on each of its nodes, from `SLURM_JOB_CPUS_PER_NODE`, such as
    `64(x2),32`."""
    found: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        found += [int(count)] * int(times or 1)
    return found


def too_few_cpus(
    places: Places, ranks: int, nodes: Sequence[str], cpus: Sequence[int], cpus_per_rank: int
) -> tuple[str, int, int] | None:
    """Return a node that has fewer CPUs than srun asks for there, with both numbers; None where
    there is none. Ranks and engines overlap, and each engine is a step of its own."""
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
    """Where everything of a stage goes on the `nodes` of its job.

    Engines that share their devices with the trainer are dealt out over all nodes from the first
    on; those of their `own` follow the last rank, and no engine stands on two nodes.

    Raises:
        BraidError: there are too few nodes, or an engine is larger than a node.
    """
    per_node = cluster.ranks_per_node
    if samples and engine.tensor > per_node:
        raise BraidError(
            f"engine.tensor = {engine.tensor} is more than ranks_per_node = {per_node} of the "
            "cluster: an engine stands on one node"
        )
    needed = nodes_needed(layout, engine if samples else None, cluster)
    if len(nodes) < needed:
        raise BraidError(
            f"this job has {len(nodes)} of the {needed} nodes that layout.ranks = {layout.ranks} "
            f"and the engines take at ranks_per_node = {per_node}; submit it with "
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
    """Of every engine the number of its node and of its first device there."""
    slots, free = [], layout.ranks
    for _ in range(engine.count):
        if free % per_node + engine.tensor > per_node:
            free += per_node - free % per_node
        slots.append((free // per_node, free % per_node))
        free += engine.tensor
    return slots
