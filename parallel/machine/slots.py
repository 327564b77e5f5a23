"""The GPUs of each rank and each engine, and their shares of the CPU cores; never imports torch.

A slot is one GPU of a node, named by its position among the GPUs that the job may use there. Ranks
fill the slots of the nodes one after another, `per_node` each. CPU cores are shared out apart from
the slots, and only where there are no GPUs: with them, the work of a process is on its devices.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from parallel.errors import UserError
from parallel.machine.gpus import Gpu, type_error
from parallel.settings import EngineSettings, LayoutSettings

VISIBLE = "CUDA_VISIBLE_DEVICES"
# The driver's own numbering. CUDA's default puts the fastest GPU first, and nvidia-smi and Slurm
# number by the bus.
ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@dataclass(frozen=True)
class EngineSlots:
    """The slots of an engine, or of one of its members: the same on each of consecutive nodes."""

    nodes: range
    slots: range


@dataclass(frozen=True)
class MachineGpus:
    """The GPUs of one machine, as positions among the visible ones.

    The ranks see all of `stage`, and rank R runs on its R-th; each engine sees its own first.
    `engines` and those of `Cores` are by process: of all engines' members, where they have some.
    """

    stage: list[int]
    engines: list[list[int]]


@dataclass(frozen=True)
class Cores:
    """The CPU cores of all ranks together and of each engine; None means any."""

    ranks: list[int] | None
    engines: list[list[int] | None]


def engine_slots(
    layout: LayoutSettings, engine: EngineSettings, per_node: int
) -> list[EngineSlots]:
    """Return the slots of every engine's members, on nodes of `per_node` slots, numbered from 0.

    shared: the engines are dealt out over the nodes in turn, from the first slot of each.
    own: they follow the last rank. An engine larger than a node takes whole nodes; any other is on
    one node. No slot has two engines, whose memory would add up.

    Raises:
        UserError: an engine is larger than a node, and no multiple of it, or a member would be on
            several nodes.
    """
    check_engine_size(engine, per_node, "slots per node")
    nodes = -(-engine.ranks // per_node)
    ranks = engine.ranks // nodes  # on each of its nodes
    if engine.placement == "own":
        return _of_members(engine, _after_ranks(layout, engine, per_node, nodes, ranks))
    of_a_node = per_node // ranks  # engines
    width = nodes_needed(layout, engine, per_node) // nodes
    slots = []
    for index in range(engine.count):
        assert index // width < of_a_node
        first_slot = index // width * ranks
        start = index % width * nodes
        slots.append(
            EngineSlots(range(start, start + nodes), range(first_slot, first_slot + ranks))
        )
    return _of_members(engine, slots)


def _of_members(engine: EngineSettings, engines: list[EngineSlots]) -> list[EngineSlots]:
    """Return the slots of the members of each engine, which fill it from its first slot."""
    if engine.data == 1:
        return engines
    member_slots = []
    for whole in engines:
        for node in whole.nodes:
            starts = range(whole.slots.start, whole.slots.stop, engine.tensor)
            member_slots += [
                EngineSlots(range(node, node + 1), range(start, start + engine.tensor))
                for start in starts
            ]
    return member_slots


def _after_ranks(
    layout: LayoutSettings, engine: EngineSettings, per_node: int, nodes: int, ranks: int
) -> list[EngineSlots]:
    slots, free = [], layout.ranks
    for _ in range(engine.count):
        if free % per_node + ranks > per_node:
            free += per_node - free % per_node
        node, first_slot = divmod(free, per_node)
        slots.append(EngineSlots(range(node, node + nodes), range(first_slot, first_slot + ranks)))
        free += engine.ranks
    return slots


def nodes_needed(layout: LayoutSettings, engine: EngineSettings | None, per_node: int) -> int:
    """Return the number of nodes of a stage; `engine` is None for a stage without sampling."""
    of_ranks = -(-layout.ranks // per_node)
    if engine is None:
        return of_ranks
    if engine.placement == "own":
        return engine_slots(layout, engine, per_node)[-1].nodes.stop
    if engine.ranks > per_node:
        return max(of_ranks, engine.count * -(-engine.ranks // per_node))
    return max(of_ranks, -(-engine.count // (per_node // engine.ranks)))


def check_engine_size(engine: EngineSettings, per_node: int, limit: str) -> None:
    """Raise UserError where an engine neither fits a node nor fills several, naming `limit`."""
    if fits_nodes(engine, per_node):
        return
    if engine.data > 1 and per_node % engine.tensor:
        raise UserError(
            f"engine: members of {engine.tensor} ranks do not fill {limit} = {per_node}; use an "
            f"engine.tensor that divides {per_node}"
        )
    raise UserError(
        f"engine: {engine.ranks} ranks exceed {limit} = {per_node} and are no multiple of it; "
        f"lower engine.tensor to {per_node} or less, or to a multiple of {per_node}"
    )


def fits_nodes(engine: EngineSettings, per_node: int) -> bool:
    """Return true if an engine fits on a node, or fills several.

    An engine of several nodes has the same number of ranks on each: vLLM's executor demands it.
    Of an engine with members each is on one node.
    """
    if engine.ranks <= per_node:
        return True
    member = engine.tensor if engine.data > 1 else 1
    return engine.ranks % per_node == 0 and per_node % member == 0


def gpus_needed(layout: LayoutSettings, engine: EngineSettings | None) -> int:
    """Return the number of GPUs of a stage and its engines on one machine, from its first."""
    if engine is None:
        return layout.ranks
    engines = engine.count * engine.ranks
    separate = engine.placement == "own"
    return layout.ranks + engines if separate else max(layout.ranks, engines)


def share_gpus(
    layout: LayoutSettings, engine: EngineSettings | None, gpus: Sequence[Gpu], offset: int = 0
) -> MachineGpus | None:
    """Return the GPUs of a stage and its engines on this machine; None where there are none.

    `engine` is None for a stage without sampling. `gpus` are those that they may use, the first at
    position `offset` of the visible ones.

    Raises:
        UserError: there are too few, or those that would be used are of several types.
    """
    if not gpus:
        return None
    needed, beside, fewer = gpus_needed(layout, engine), "", "ranks"
    if engine is not None:
        beside = (
            f" {'and' if engine.placement == 'own' else 'in turn with'} {engine.count} engines of "
            f"{engine.ranks} (engine.placement: {engine.placement})"
        )
        fewer = "ranks or engines"
    if needed > len(gpus):
        raise UserError(
            f"{needed} GPUs are needed, {len(gpus)} available here: layout.ranks = {layout.ranks}"
            f"{beside}, one GPU for each rank; use fewer {fewer}, or submit to a cluster"
        )
    check_alike(gpus[:needed], "this machine")
    slots = [] if engine is None else engine_slots(layout, engine, len(gpus))
    return MachineGpus(
        stage=list(range(offset, offset + len(gpus))),
        engines=[[offset + slot for slot in member.slots] for member in slots],
    )


def check_alike(gpus: Sequence[Gpu], where: str) -> None:
    """Raise UserError where GPUs that work together are of several types."""
    if (trouble := type_error(gpus)) is not None:
        raise UserError(f"{where} has {trouble}")


def check_gpu_count(
    gpus: Sequence[Gpu], needed: int, where: str, why: str = "gpus_per_node ="
) -> None:
    """Raise UserError where a node shows fewer GPUs than are needed there, or mixed ones.

    No GPU at all is no error: without nvidia-smi nothing can be counted.
    """
    if gpus and len(gpus) < needed:
        raise UserError(
            f"{where} has {len(gpus)} visible GPU{'s' if len(gpus) > 1 else ''}, and {why} "
            f"{needed}; correct the cluster's profile, or exclude the node with options: "
            f"[--exclude={where}]"
        )
    check_alike(gpus[:needed], where)


def gpu_environment(positions: Sequence[int], visible: str | None) -> dict[str, str]:
    """Return the variables that leave a process these GPUs, by position in `visible`.

    `visible` is the CUDA_VISIBLE_DEVICES so far, by number or UUID; None shows all by number.

    Raises:
        UserError: fewer are visible; the message has the numbers.
    """
    names = None if visible is None else [name.strip() for name in visible.split(",") if name]
    if names is None:
        return {**ORDER, VISIBLE: ",".join(map(str, positions))}
    if max(positions, default=-1) >= len(names):
        raise UserError(
            f"{VISIBLE}={visible}: {len(names)} GPUs are visible, and the processes here are "
            f"placed on {max(positions) + 1}; check gpus_per_node in the cluster's profile, and "
            "its options for --gpus-per-task and --gpu-bind, which hide GPUs"
        )
    return {**ORDER, VISIBLE: ",".join(names[position] for position in positions)}


def own_first(engine_gpus: Sequence[int], visible: Sequence[int]) -> list[int]:
    """Return an engine's GPUs, then the other visible ones of its node.

    vLLM uses the first that it sees. The others are there for a refit alone: CUDA IPC maps the
    memory of another process only from a device that the mapping process sees.
    """
    return [*engine_gpus, *(gpu for gpu in visible if gpu not in engine_gpus)]


def local_device(local_rank: str, visible: int) -> int:
    """Return the number of a rank's device; one that Slurm bound to a single GPU sees only 0."""
    return int(local_rank) % visible


def share_cores(engine: EngineSettings, cores: Sequence[int] | None = None) -> Cores:
    """Divide the CPU cores, by default all that this process may use, by `engine.placement`.

    own: each engine rank gets one of the last cores, and the trainer's ranks share the rest.
    shared: the ranks may use all cores, and each engine an equal part, if there are enough.

    Raises:
        UserError: no core is left for the trainer's ranks.
    """
    cores = sorted(os.sched_getaffinity(0) if cores is None else cores)
    if engine.placement == "shared":
        members = len(engine.members)
        share = len(cores) // members
        if members == 1 or share < engine.tensor:
            return Cores(None, [None] * members)
        starts = range(0, members * share, share)
        return Cores(None, [cores[start : start + share] for start in starts])
    first_engine_core = len(cores) - engine.count * engine.ranks
    if first_engine_core < 1:
        raise UserError(
            f"engine.placement: own needs {engine.count * engine.ranks + 1} CPU cores, one for "
            f"each of {engine.count} x {engine.ranks} engine ranks and at least one for the "
            f"trainer, {len(cores)} available; use fewer engines, or shared"
        )
    starts = range(first_engine_core, len(cores), engine.tensor)
    return Cores(
        cores[:first_engine_core], [cores[start : start + engine.tensor] for start in starts]
    )
