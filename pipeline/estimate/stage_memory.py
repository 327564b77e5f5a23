"""The bytes of a stage: of its models on its ranks, and of every phase on the GPUs of its node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel.errors import UserError
from parallel.estimates.engine_memory import GIB, engine_share
from parallel.estimates.memory import (
    RankMemory,
    RankModels,
    forward_activations,
    head_bytes,
    reading_memory,
    routed_bytes,
    training_memory,
)
from parallel.estimates.phases import EngineOnGpus, PhaseMemory, neighbours, phases
from parallel.machine.gpus import usable_gpus
from parallel.machine.slots import gpus_needed
from parallel.micro_batches import most_row_tokens, slot_tokens
from parallel.settings import OptimizerSettings, Settings
from pipeline.config.cluster import ClusterSettings
from pipeline.run.graph import Stage
from pipeline.text import human, shown
from stages.data.settings import ConversationFileSettings
from stages.domains import LoopSettings, PolicySettings
from stages.kinds.distill.settings import DistillSettings, domain_of
from stages.kinds.dpo.settings import DpoSettings, PairSettings
from stages.kinds.grpo.settings import GrpoSettings
from stages.kinds.kind import StageSettings
from stages.kinds.mixture_settings import StageSourceSettings
from stages.kinds.sft.settings import SftSettings
from stages.objectives.advantages.gae import GaeSettings
from stages.objectives.kl import AVERAGE
from stages.objectives.loss import ObjectiveSettings
from stages.settings import RunSettings


def stage_memory(stage: Stage, settings: RunSettings) -> list[RankMemory]:
    """Return the memory of a rank of every pipeline rank while the stage runs."""
    return [models.memory for models in stage_models(stage, settings)]


def fullest(ranks: list[RankMemory]) -> RankMemory:
    """Return the rank that needs most, which decides what fits."""
    return max(ranks, key=lambda rank: rank.total)


def largest_memory(settings: RunSettings, stages: Sequence[Stage]) -> str:
    """Return the memory of the fullest rank of all stages, and its stage, in a line."""
    needs = {stage.name: fullest(stage_memory(stage, settings)).total for stage in stages}
    name = max(needs, key=lambda name: needs[name])
    return f"the fullest rank needs {human(needs[name])}, in {name} (--memory shows every stage)"


def stage_models(stage: Stage, settings: RunSettings) -> list[RankModels]:
    """Return the models of a stage on a rank of every pipeline rank, or the one that it reads."""
    model, layout = settings.model, settings.layout
    if not stage.steps:
        return [RankModels(rank, trains=False) for rank in reading_memory(model, layout)]
    optimizer, tokens = trained_by(stage, settings)[0], row_tokens(stage, settings)
    frozen, averages = compared_with(stage, settings)
    ranks = training_memory(model, layout, optimizer, tokens, frozen, averages)
    critics: Sequence[RankMemory | None] = [None] * len(ranks)
    if (policy := rewarded(stage, settings)) is None:
        updates, heads = 1, heads_needed(stage, settings)
    else:
        by_domain = objectives(stage, settings).values()
        heads = frozen * any(objective.kl.needs_logits for objective in by_domain)
        updates = policy.updates_per_rollout
        if isinstance(advantage := policy.objective.advantage, GaeSettings):
            optimizer = advantage.critic.optimizer
            critics = training_memory(model, layout, optimizer, tokens, values=True)
    return [
        RankModels(
            policy=rank,
            critic=critic,
            forward=forward_activations(model, layout, tokens),
            routed=routed_bytes(model, layout, tokens),
            frozen=rank.frozen // max(1, frozen + averages),
            frozen_models=frozen + averages,
            heads=heads * head_bytes(model, layout) if number == len(ranks) - 1 else 0,
            updates=updates,
        )
        for number, (rank, critic) in enumerate(zip(ranks, critics, strict=True))
    ]


def trained_by(stage: Stage, settings: RunSettings) -> tuple[OptimizerSettings, LoopSettings]:
    """Return the optimizer and the loop of a stage that trains."""
    assert stage.block is not None
    optimizer_and_loop = settings.stages[stage.block].trained_by(settings, stage.domains)
    assert optimizer_and_loop is not None, f"{stage.name} trains nothing"
    return optimizer_and_loop


def row_tokens(stage: Stage, settings: RunSettings) -> int:
    """Return the most tokens of a micro-batch, on all context-parallel ranks together."""
    context, budget = settings.layout.context, trained_by(stage, settings)[1].micro_batch_tokens
    unit = slot_tokens(longest_sequence(stage, settings), context)
    if isinstance(_block(stage, settings), DpoSettings):
        unit *= 2  # the two of a pair are in one micro-batch
    return most_row_tokens(budget, context, unit)


def longest_sequence(stage: Stage, settings: RunSettings) -> int:
    """Return the tokens of the longest sequence that a stage may train on, as far as it is known.

    0 for generated demonstrations, whose texts decide it.
    """
    block = _block(stage, settings)
    if not isinstance(block, SftSettings | DpoSettings):
        return settings.engine.max_model_tokens
    sources: list[Settings] = [*block.data.values()]
    if isinstance(block, SftSettings):
        names = block.demonstrated(stage.domains)
        sources += [settings.domains[name].demonstrations for name in names]
    return max((_longest_row(source, settings) for source in sources), default=0)


def samples_per_step(stage: Stage, settings: RunSettings) -> int:
    """Return the responses that a stage samples for a step; 0 where it samples none."""
    block = rewarded(stage, settings) or _block(stage, settings)
    sampling = getattr(block, "sampling", None)
    if sampling is None:
        return 0
    return len(stage.domains) * sampling.prompts_per_step * sampling.group_size


def _longest_row(source: Settings, settings: RunSettings) -> int:
    """Return the tokens of the longest row that is read of a source."""
    longest = settings.model.max_positions
    if isinstance(source, StageSourceSettings):
        longest = min(longest, settings.engine.max_model_tokens)
    elif not isinstance(source, ConversationFileSettings | PairSettings):
        return 0
    return min(longest, getattr(source, "max_tokens", None) or longest)


def _block(stage: Stage, settings: RunSettings) -> StageSettings | None:
    return settings.stages[stage.block] if stage.block is not None else None


def rewarded(stage: Stage, settings: RunSettings) -> PolicySettings | None:
    """Return the settings of a stage that learns from rewards, None of another one."""
    if stage.block is None or not stage.trains:
        return None
    return settings.stages[stage.block].policy(settings, stage.domains)


def compared_with(stage: Stage, settings: RunSettings) -> tuple[int, int]:
    """Return the number of frozen teachers or references, and of moving averages of the policy.

    A model that several domains name, or an average of one decay, is kept once; of the teachers
    that come in turn one is.
    """
    if rewarded(stage, settings) is None:
        decay = _self_decay(stage, settings)
        return sum(_teachers(stage, settings)) + (decay == 1), int(0 < decay < 1)
    by_domain = objectives(stage, settings).items()
    penalties = {
        name: objective.kl for name, objective in by_domain if objective.kl.coefficient > 0
    }
    averages = {kl.ema_decay for kl in penalties.values() if kl.reference == AVERAGE}
    frozen_domains = [name for name, kl in penalties.items() if kl.reference != AVERAGE]
    return len({stage.models.get(name, stage.parent) for name in frozen_domains}), len(averages)


def heads_needed(stage: Stage, settings: RunSettings) -> int:
    """Return the number of frozen models' output heads that a merge needs at once."""
    several = Counter(map(domain_of, stage.teachers))  # by domain, mixed in one loss
    teachers, start = _teachers(stage, settings)
    return max([teachers, *several.values()]) + start


def _teachers(stage: Stage, settings: RunSettings) -> tuple[int, int]:
    """Return the number of teachers that a rank holds, and of models they started from: 0 or 1."""
    block, distinct = _block(stage, settings), len(set(stage.teachers.values()))
    if not isinstance(block, DistillSettings):
        return distinct, 0
    held = min(distinct, 1) if block.teacher_memory.resident == "one" else distinct
    return held, int(block.method.start_model is not None)


def _self_decay(stage: Stage, settings: RunSettings) -> float:
    """Return the decay of a merge's teacher `self`: 1 keeps it frozen; 0 where there is none."""
    block = _block(stage, settings)
    if isinstance(block, DistillSettings) and block.self_taught(stage.domains):
        return block.self_teacher.ema_decay
    return 0.0


def objectives(stage: Stage, settings: RunSettings) -> dict[str, ObjectiveSettings]:
    """Return the objective of each domain of a stage that learns from rewards."""
    if isinstance(block := _block(stage, settings), GrpoSettings):
        return block.objectives(settings, stage.domains)
    policy = rewarded(stage, settings)
    return {} if policy is None else dict.fromkeys(stage.domains, policy.objective)


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
