"""The bytes of a stage's models on its ranks, from the run's settings."""

from __future__ import annotations

from collections import Counter

from parallel.estimates.memory import RankMemory, reading_memory, training_memory
from parallel.micro_batches import most_row_tokens, slot_tokens
from parallel.settings import OptimizerSettings, Settings
from pipeline.run.graph import Stage
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
    ranks, critic = policy_memory(stage, settings), critic_memory(stage, settings)
    if critic is None:
        return ranks
    return [rank.beside(other) for rank, other in zip(ranks, critic, strict=True)]


def policy_memory(stage: Stage, settings: RunSettings) -> list[RankMemory]:
    """Return the memory of the stage's policy, or of the model that it reads, as `stage_memory`."""
    if not stage.steps:
        return reading_memory(settings.model, settings.layout)
    optimizer, tokens = trained_by(stage, settings)[0], row_tokens(stage, settings)
    frozen, averages = compared_with(stage, settings)
    return _trained(settings, optimizer, tokens, frozen_models=frozen, averages=averages)


def critic_memory(stage: Stage, settings: RunSettings) -> list[RankMemory] | None:
    """Return the memory of the stage's critic, None where it has none."""
    policy = rewarded(stage, settings) if stage.steps else None
    if policy is None or not isinstance(policy.objective.advantage, GaeSettings):
        return None
    optimizer = policy.objective.advantage.critic.optimizer
    return _trained(settings, optimizer, row_tokens(stage, settings), values=True)


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
    block, sampled = _block(stage, settings), settings.engine.max_model_tokens
    sources: list[Settings] = []
    if isinstance(block, SftSettings):
        names = block.demonstrated(stage.domains)
        sources += [
            *block.data.values(),
            *(settings.domains[name].demonstrations for name in names),
        ]
    elif isinstance(block, DpoSettings):
        sources += block.data.values()
    else:
        return sampled
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
        frozen, moving = _self_teachers(stage, settings)
        return _teachers(stage, settings) + _starts(stage, settings) + frozen, moving
    kl_settings = {name: objective.kl for name, objective in objectives(stage, settings).items()}
    penalties = {name: kl for name, kl in kl_settings.items() if kl.coefficient > 0}
    averages = {kl.ema_decay for kl in penalties.values() if kl.reference == AVERAGE}
    frozen_domains = [name for name, kl in penalties.items() if kl.reference != AVERAGE]
    return len({stage.models.get(name, stage.parent) for name in frozen_domains}), len(averages)


def heads_needed(stage: Stage, settings: RunSettings) -> int:
    """Return the number of frozen models' output heads that a merge needs at once."""
    several = Counter(map(domain_of, stage.teachers))
    at_once = max(several.values(), default=0)
    return max(_teachers(stage, settings), at_once) + _starts(stage, settings)


def _teachers(stage: Stage, settings: RunSettings) -> int:
    """Return the number of teachers that a rank holds."""
    block = _block(stage, settings)
    one = isinstance(block, DistillSettings) and block.teacher_memory.resident == "one"
    distinct = len(set(stage.teachers.values()))
    return min(distinct, 1) if one else distinct


def _self_teachers(stage: Stage, settings: RunSettings) -> tuple[int, int]:
    """Return the frozen models and the averages that are a merge's teacher `self`."""
    block = _block(stage, settings)
    if not isinstance(block, DistillSettings) or not block.self_taught(stage.domains):
        return 0, 0
    decay = block.self_teacher.ema_decay
    return int(decay == 1), int(0 < decay < 1)


def _starts(stage: Stage, settings: RunSettings) -> int:
    """Return 1 for a merge that also loads the model that its teachers started from, else 0."""
    block = _block(stage, settings)
    return int(isinstance(block, DistillSettings) and block.method.start_model is not None)


def objectives(stage: Stage, settings: RunSettings) -> dict[str, ObjectiveSettings]:
    """Return the objective of each domain of a stage that learns from rewards."""
    assert stage.block is not None
    block = settings.stages[stage.block]
    if isinstance(block, GrpoSettings):
        return block.objectives(settings, stage.domains)
    policy = block.policy(settings, stage.domains)
    return {} if policy is None else dict.fromkeys(stage.domains, policy.objective)


def _trained(
    settings: RunSettings,
    optimizer: OptimizerSettings,
    tokens: int,
    frozen_models: int = 0,
    averages: int = 0,
    values: bool = False,
) -> list[RankMemory]:
    return training_memory(
        settings.model,
        settings.layout,
        optimizer.algorithm,
        tokens,
        frozen_models,
        averages,
        values,
        optimizer.precision_aware,
        optimizer.cpu_offload,
    )
