"""The seconds of a weight sync, by the plan that a run would follow."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from parallel.estimates.roofline.hardware import DataSheet, Efficiencies
from parallel.estimates.tensor_sizes import BYTES
from parallel.machine.slots import engine_slots
from parallel.settings import EngineSettings, LayoutSettings, ModelSettings
from parallel.weights.planner import EngineSizes, Hosts, Plan


@dataclass(frozen=True)
class SyncedBytes:
    """The bytes that one rank receives or sends in a weight sync, and the tensors that it loads."""

    received: int  # by an engine rank
    sent: float  # by a trainer's rank, on average; nothing where engines map its memory
    tensors: int
    near: bool  # whether every engine maps the memory of its own hosts


def synced_bytes(
    model: ModelSettings, layout: LayoutSettings, engine: EngineSettings, per_node: int
) -> SyncedBytes:
    """Return the bytes of a weight sync by its plan; all engines are of one size.

    Raises:
        UserError: the engines do not fit nodes of `per_node` GPUs.
    """
    slots = engine_slots(layout, engine, per_node)
    trainers = tuple(rank // per_node for rank in range(layout.ranks))
    hosts = tuple(
        node for placed in slots for node in placed.nodes for _ in placed.slots
    )  # in the order of the engines' ranks
    may_map = engine.transport != "messages"
    plan = Plan(
        model,
        layout,
        EngineSizes(
            (engine.ranks,) * engine.count,
            expert_parallel=engine.expert_parallel,
            data=engine.data,
            hosts=Hosts(trainers, hosts) if may_map else None,
        ),
    )
    buckets = plan.receive(0)
    size = BYTES[model.precision]
    received = size * sum(prod(box[1]) for bucket in buckets for _, box in bucket.needs)
    near = may_map and set(hosts) <= set(trainers)
    sent = 0.0 if near else received * engine.ranks * len(plan.fed) / layout.ranks
    return SyncedBytes(received, sent, sum(len(bucket.needs) for bucket in buckets), near)


def sync_seconds(synced: SyncedBytes, gpu: DataSheet, reached: Efficiencies) -> float:
    """Return the seconds of a weight sync: the longer of its bytes' way and their loading."""
    way = gpu.link_bandwidth * reached.link
    if not synced.near:
        way = gpu.network_bandwidth * reached.network
    return max(max(synced.received, synced.sent) / way, synced.tensors * reached.load)
