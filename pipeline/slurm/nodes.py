"""Which nodes of a job the ranks and the engines of a stage run on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallel.settings import EngineSettings, LayoutSettings
from pipeline.errors import BraidError
from pipeline.slurm.settings import ClusterSettings


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
            f"and the engines take at ranks_per_node = {per_node}; submit it with --nodes={needed}"
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
