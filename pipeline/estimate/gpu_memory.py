"""The memory of every phase of a stage on its GPUs, and the tables of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel.errors import UserError
from parallel.estimates.activations import forward_activations, routed_bytes
from parallel.estimates.engine_memory import GIB, engine_share, gib
from parallel.estimates.memory import head_bytes
from parallel.estimates.phases import (
    EngineOnGpus,
    PhaseMemory,
    RankModels,
    checkpoint_copies,
    fullest_phases,
    neighbours,
)
from parallel.machine.gpus import usable_gpus
from parallel.machine.slots import gpus_needed
from pipeline.config.cluster import ClusterSettings
from pipeline.estimate.stage_memory import (
    compared_with,
    critic_memory,
    heads_needed,
    objectives,
    policy_memory,
    rewarded,
    row_tokens,
)
from pipeline.run.graph import Stage
from pipeline.tables import Cell, table
from pipeline.text import shown
from stages.settings import RunSettings


@dataclass(frozen=True)
class NodeGpus:
    """The GPUs of a node for ranks and engines: their number, and the bytes of the smallest."""

    count: int
    gpu_bytes: int


GpusOf = Callable[[str], NodeGpus | None]


def gpus_of(cluster: ClusterSettings) -> GpusOf:
    """Return the function that gives the GPUs of a kind's node in a profile, if it says them."""
    return lambda kind: _of_profile(cluster.of_kind(kind))


def unchecked(cluster: ClusterSettings, profile: Path, stages: Iterable[Stage]) -> list[str]:
    """Return a line that says so where stages get GPUs whose memory the profile leaves out."""
    nodes = [cluster.of_kind(kind) for kind in {stage.kind for stage in stages}]
    if not any(node.gpus_per_node and node.gpu_memory_gib is None for node in nodes):
        return []
    return [
        f"memory is not checked: set gpu_memory_gib in {shown(profile)} (79.2 for an H100 of 80 GB)"
    ]


def gpus_here(settings: RunSettings, parallel: int = 1) -> GpusOf:
    """Return the function that gives this machine's GPUs, None where they are not known.

    Each of `parallel` stages has an equal part of them, and uses the first of its part. A login
    node may have the driver's program and no GPU: its error is none of a configuration.
    """
    try:
        gpus = usable_gpus()
    except UserError:
        gpus = []
    if not gpus:
        return lambda _: None
    per_stage, needed = max(1, len(gpus) // parallel), gpus_needed(settings.layout, settings.engine)
    used = [
        gpu.total_bytes
        for position, gpu in enumerate(gpus[: per_stage * parallel])
        if position % per_stage < needed
    ]
    here = NodeGpus(per_stage, min(used))
    return lambda _: here


def stage_phases(stage: Stage, settings: RunSettings, gpus: NodeGpus) -> list[PhaseMemory]:
    """Return every phase of a step of the stage, each on the pipeline's rank that needs most."""
    engines = _engines(settings, gpus) if stage.needs_engine else None
    return fullest_phases(_models(stage, settings), engines)


def gpu_cache(stage: Stage, gpus: NodeGpus, settings: RunSettings) -> int | None:
    """Return the bytes of an engine's KV cache on each GPU; None where the stage has no engine."""
    found = (phase.gpu for phase in stage_phases(stage, settings, gpus))
    return next((parts["KV cache"] for parts in found if "KV cache" in parts), None)


def phase_table(stage: Stage, settings: RunSettings, gpus: NodeGpus) -> Iterator[str]:
    """Yield the table of a stage's phases: components on a GPU, and copies on the host."""
    phases = stage_phases(stage, settings, gpus)
    names = dict.fromkeys(name for phase in phases for name in phase.gpu)
    title = f"{stage.name}: GiB on a GPU in each phase of a step; a GPU has {gib(gpus.gpu_bytes)}"
    rows = [_row(name, [phase.gpu.get(name, 0) for phase in phases]) for name in names]
    totals = [phase.total for phase in phases]
    rows += [
        _row("total", totals, "bold"),
        _row("free", [gpus.gpu_bytes - total for total in totals]),
    ]
    headings = ("component", *(_heading(phase) for phase in phases))
    yield table(title, headings, rows, right=range(1, len(headings)))
    yield ""
    yield from _host_table(stage, settings, gpus)


def _host_table(stage: Stage, settings: RunSettings, gpus: NodeGpus) -> Iterator[str]:
    """Yield the table of a rank's bytes on the host; only one kind of checkpoint is there."""
    models = _models(stage, settings)
    phases = stage_phases(stage, settings, gpus)
    host_bytes = {name: max(phase.host.get(name, 0) for phase in phases) for name in _names(phases)}
    copies = max((checkpoint_copies(each) for each in models), key=lambda each: max(each.values()))
    if stage.steps:
        host_bytes[max(copies, key=lambda name: copies[name])] = max(copies.values())
    if not host_bytes:
        return
    ranks = min(settings.layout.ranks, gpus.count)
    rows = [_row(name, [count, ranks * count]) for name, count in host_bytes.items()]
    total = sum(host_bytes.values())
    rows.append(_row("total", [total, ranks * total], "bold"))
    headings = ("component", "a rank", f"{ranks} rank{'s' if ranks > 1 else ''} of a node")
    yield table(f"{stage.name}: GiB on the host", headings, rows, right=range(1, 3))
    yield ""


def _names(phases: Sequence[PhaseMemory]) -> dict[str, None]:
    return dict.fromkeys(name for phase in phases for name in phase.host)


def _heading(phase: PhaseMemory) -> str:
    return phase.phase if phase.where == "GPU" else f"{phase.phase} ({phase.where})"


def _row(name: str, counts: Sequence[int], style: str = "") -> list[str | Cell]:
    return [name, *(Cell(f"{count / GIB:,.2f}" if count else "", style) for count in counts)]


def _of_profile(cluster: ClusterSettings) -> NodeGpus | None:
    if not cluster.gpus_per_node or cluster.gpu_memory_gib is None:
        return None
    return NodeGpus(cluster.ranks_per_node, round(cluster.gpu_memory_gib * GIB))


def _engines(settings: RunSettings, gpus: NodeGpus) -> EngineOnGpus:
    engine = settings.engine
    return EngineOnGpus(
        engine_share(settings.model, engine),
        shared=engine.placement == "shared",
        neighbours=neighbours(settings.layout, engine, gpus.count),
        gpu_bytes=gpus.gpu_bytes,
    )


def _models(stage: Stage, settings: RunSettings) -> list[RankModels]:
    """Return the stage's models on a rank of every pipeline rank."""
    model, layout = settings.model, settings.layout
    ranks = policy_memory(stage, settings)
    if not stage.steps:
        return [RankModels(rank, trains=False) for rank in ranks]
    tokens = row_tokens(stage, settings)
    frozen, averages = compared_with(stage, settings)
    critic = critic_memory(stage, settings)
    block = rewarded(stage, settings)
    logits = (
        [objective.kl.needs_logits for objective in objectives(stage, settings).values()]
        if block
        else [True]
    )
    headed = heads_needed(stage, settings) if block is None else frozen * any(logits)
    return [
        RankModels(
            policy=policy,
            critic=critic[number] if critic else None,
            forward=forward_activations(model, layout, tokens),
            routed=routed_bytes(model, layout, tokens),
            frozen=policy.frozen // max(1, frozen + averages),
            frozen_models=frozen + averages,
            updates=1 if block is None else block.updates_per_rollout,
            heads=headed * head_bytes(model, layout) if number == len(ranks) - 1 else 0,
        )
        for number, policy in enumerate(ranks)
    ]
