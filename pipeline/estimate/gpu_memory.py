"""The GPUs of a stage's node, and the memory of every phase of the stage on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from parallel.errors import UserError
from parallel.estimates.engine_memory import GIB, engine_share
from parallel.estimates.phases import EngineOnGpus, PhaseMemory, neighbours, phases
from parallel.machine.gpus import usable_gpus
from parallel.machine.slots import gpus_needed
from pipeline.config.cluster import ClusterSettings
from pipeline.estimate.stage_memory import stage_models
from pipeline.run.graph import Stage
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

    def of_kind(kind: str) -> NodeGpus | None:
        node = cluster.of_kind(kind)
        if not node.gpus_per_node or node.gpu_memory_gib is None:
            return None
        return NodeGpus(node.ranks_per_node, round(node.gpu_memory_gib * GIB))

    return of_kind


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
    engine, engines = settings.engine, None
    if stage.needs_engine:
        engines = EngineOnGpus(
            engine_share(settings.model, engine),
            shared=engine.placement == "shared",
            neighbours=neighbours(settings.layout, engine, gpus.count),
            gpu_bytes=gpus.gpu_bytes,
        )
    by_rank = [phases(models, engines) for models in stage_models(stage, settings)]
    # The fullest rank of one phase is not that of another: the first has most layers in flight, the
    # last the logits.
    return [max(same, key=lambda phase: phase.total) for same in zip(*by_rank, strict=True)]
