"""The nodes of a job that a stage's ranks and engines run on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from parallel.settings import EngineSettings, LayoutSettings
from pipeline.config.cluster import ClusterSettings
from pipeline.errors import BraidError


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
        BraidError: there are too few nodes, or an engine is larger than a node.
    """
    per_node = cluster.ranks_per_node
    if samples and engine.tensor > per_node:
        raise BraidError(
            f"engine.tensor = {engine.tensor} exceeds the cluster's ranks_per_node = {per_node}; "
            "an engine must fit on one node"
        )
    needed = nodes_needed(layout, engine if samples else None, cluster)
    if len(nodes) < needed:
        raise BraidError(
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
