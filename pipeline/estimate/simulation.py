"""The seconds, tokens and GPU hours of every stage that trains, before it is run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from parallel.errors import UserError, hint
from parallel.estimates.roofline.hardware import GIB, GPUS, REACHED, DataSheet
from parallel.estimates.roofline.step import StepSeconds, step_seconds
from parallel.estimates.roofline.weight_sync import SyncedBytes, sync_seconds, synced_bytes
from parallel.estimates.roofline.work import StepWorkload
from parallel.machine.slots import gpus_needed
from pipeline.config.cluster import ClusterSettings
from pipeline.estimate.stage_memory import (
    compared_with,
    objectives,
    rewarded,
    samples_per_step,
    trained_by,
)
from pipeline.run.graph import Stage
from pipeline.tables import Cell, table
from pipeline.text import clock
from stages.domains import PromptRolloutSettings
from stages.kinds.distill.settings import DistillSettings
from stages.kinds.dpo.settings import DpoSettings
from stages.kinds.kind import KINDS
from stages.kinds.sft.settings import SftSettings
from stages.settings import RunSettings

HOUR = 3600.0
FILLED, PER_NODE = 0.6, 8  # of `Assumptions`, unless stated
HEADINGS = (
    *("stage", "steps", "rollout", "log-probs", "train", "sync", "other", "a step"),
    *("tokens/s/GPU", "bubble", "time", "GPUs", "GPU hours"),
)


@dataclass(frozen=True)
class SimulatedStage:
    """A stage's step in seconds, on a number of GPUs, with the tokens of a step."""

    stage: Stage
    steps: int
    gpus: int
    tokens: float
    seconds: StepSeconds

    @property
    def tokens_per_gpu(self) -> float:
        """The tokens a second of each GPU."""
        return self.tokens / self.seconds.total / self.gpus

    @property
    def duration(self) -> float:
        """The seconds of all steps."""
        return self.steps * self.seconds.total

    @property
    def gpu_hours(self) -> float:
        """The hours of all GPUs."""
        return self.duration * self.gpus / HOUR


@dataclass(frozen=True)
class Assumptions:
    """The GPUs of a simulation, and what only a run would tell.

    `filled` is a sequence's mean tokens as a share of the longest; `imbalance` the tokens of the
    fullest expert-parallel rank over their mean. Stages of some `kinds` have other GPUs.
    """

    gpu: DataSheet
    per_node: int
    filled: float
    imbalance: float
    kinds: Mapping[str, DataSheet] = field(default_factory=dict)

    def sheet(self, kind: str) -> DataSheet:
        """Return the data sheet of the GPUs of a kind of stage."""
        return self.kinds.get(kind, self.gpu)


def data_sheet(gpu: str | None, profile: ClusterSettings | None) -> DataSheet:
    """Return a GPU's data sheet, of a profile's type where none is named.

    Its memory is the profile's `gpu_memory_gib` where that is stated, as in `braid plan --memory`.

    Raises:
        UserError: no GPU is named, or an unknown one.
    """
    name = gpu or (profile.gpu_type if profile else None)
    if name is None:
        raise UserError("name the GPU: --gpu h100, or gpu_type in the profile of --cluster")
    if (sheet := GPUS.get(name.lower())) is None:
        raise UserError(f"no GPU {name} is known; {hint(name, GPUS)}")
    stated = profile.gpu_memory_gib if profile else None
    return sheet if stated is None else replace(sheet, memory_bytes=round(stated * GIB))


def sheets_of_kinds(gpu: str | None, profile: ClusterSettings | None) -> dict[str, DataSheet]:
    """Return the data sheets of the kinds of stages that a profile gives other GPUs.

    Only stages that train are timed: of other kinds it is the memory alone that counts, and their
    GPUs need not be known.
    """
    sheets: dict[str, DataSheet] = {}
    for kind in profile.kinds if profile else ():
        assert profile is not None
        kind_profile, common = profile.of_kind(kind), data_sheet(gpu, profile)
        if not KINDS[kind].trains:
            kind_profile = kind_profile.model_copy(update={"gpu_type": profile.gpu_type})
        sheet = data_sheet(gpu if kind_profile.gpu_type == profile.gpu_type else None, kind_profile)
        if sheet != common:
            sheets[kind] = sheet
    return sheets


def simulated(
    stages: Iterable[Stage], settings: RunSettings, assumed: Assumptions
) -> list[SimulatedStage]:
    """Return the simulation of every stage that trains."""
    engine = settings.engine
    simulations: list[SimulatedStage] = []
    synced: SyncedBytes | None = None  # the same in all stages
    for stage in stages:
        if not stage.steps:
            continue
        sync = 0.0
        if stage.needs_engine:
            if synced is None:
                synced = synced_bytes(settings.model, settings.layout, engine, assumed.per_node)
            sync = sync_seconds(synced, assumed.sheet(stage.kind), REACHED)
        simulations.append(without_sync(stage, settings, assumed, sync))
    return simulations


def without_sync(
    stage: Stage, settings: RunSettings, assumed: Assumptions, sync: float = 0.0
) -> SimulatedStage:
    """Return the simulation of a stage that trains, whose weight syncs take `sync` seconds."""
    assert stage.steps is not None
    engine = settings.engine if stage.needs_engine else None
    work = workload(stage, settings, assumed)
    seconds = step_seconds(
        settings.model,
        settings.layout,
        engine,
        work,
        assumed.sheet(stage.kind),
        REACHED,
        sync if engine else 0.0,
    )
    gpus = gpus_needed(settings.layout, engine)
    return SimulatedStage(stage, stage.steps, gpus, work.tokens, seconds)


def workload(stage: Stage, settings: RunSettings, assumed: Assumptions) -> StepWorkload:
    """Return the sequences of a stage's step."""
    assert stage.block is not None
    block, policy = settings.stages[stage.block], rewarded(stage, settings)
    frozen = sum(compared_with(stage, settings))
    budget = trained_by(stage, settings)[1].micro_batch_tokens
    row = budget * settings.layout.context
    rollout: PromptRolloutSettings
    if policy is not None:
        sampled, rollout, updates = policy.sampling, policy.rollout, policy.updates_per_rollout
        frozen += pi_old_passes(stage, settings, updates)
    elif isinstance(block, DistillSettings):
        sampled, rollout, updates = block.sampling, block.rollout, 1
    else:
        longest = min(budget, settings.model.max_positions)
        return StepWorkload(
            _unsampled_sequences(stage, settings),
            mean_tokens=assumed.filled * longest,
            most_tokens=longest,
            row_tokens=row,
            passes=frozen,
            imbalance=assumed.imbalance,
        )
    longest = sampled.max_response_tokens + _prompt_tokens(stage, settings)
    return StepWorkload(
        samples_per_step(stage, settings),
        mean_tokens=assumed.filled * longest,
        most_tokens=longest,
        # A sequence longer than the budget is a row by itself.
        row_tokens=max(row, assumed.filled * longest),
        passes=frozen,
        updates=updates,
        steps_in_flight=1 + rollout.max_steps_ahead,
        imbalance=assumed.imbalance,
    )


def pi_old_passes(stage: Stage, settings: RunSettings, updates: int) -> int:
    """Return the passes for pi_old: none where the pass with a step's only gradients gives it."""
    recorded = any(
        objective.needs_entropies or objective.ratio.needs_router_shift
        for objective in objectives(stage, settings).values()
    )
    return int(updates > 1 or recorded)


def _prompt_tokens(stage: Stage, settings: RunSettings) -> int:
    """Return the room that the longest responses of all domains and merges leave for prompts."""
    assert stage.block is not None
    samplings = [domain.sampling for domain in settings.domains.values()]
    samplings += [
        block.sampling for block in settings.stages.values() if isinstance(block, DistillSettings)
    ]
    longest = max(sampling.max_response_tokens for sampling in samplings if sampling is not None)
    return max(0, settings.engine.max_model_tokens - longest)


def _unsampled_sequences(stage: Stage, settings: RunSettings) -> int:
    """Return the sequences of a step that samples none: demonstrations, or both of each pair."""
    assert stage.block is not None
    block = settings.stages[stage.block]
    if isinstance(block, DpoSettings):
        return 2 * block.pairs_per_step
    if isinstance(block, SftSettings) and block.sequences_per_step is not None:
        return block.sequences_per_step
    sources = (settings.domains[name].demonstrations for name in stage.domains)
    return sum(
        demonstrations.sequences_per_step
        for demonstrations in sources
        if demonstrations is not None
    )


def simulation_text(simulations: Sequence[SimulatedStage], settings: RunSettings) -> str:
    """Return the table of the stages."""
    rows: list[list[str | Cell]] = []
    for simulation in simulations:
        seconds = simulation.seconds
        phases = [seconds.rollout, seconds.logprobs, seconds.train, seconds.weight_sync]
        rows.append(
            [
                simulation.stage.name,
                str(simulation.steps),
                *(_seconds(phase) for phase in (*phases, seconds.other, seconds.total)),
                f"{simulation.tokens_per_gpu:,.0f}",
                f"{seconds.bubble:.0%}",
                clock(simulation.duration),
                str(simulation.gpus),
                f"{simulation.gpu_hours:,.0f}",
            ]
        )
    title = f"{settings.name}: seconds of a step"
    return table(title, HEADINGS, rows, right=range(1, len(HEADINGS)))


def simulation_json(simulations: Sequence[SimulatedStage]) -> dict[str, Any]:
    """Return what `braid simulate --json` prints."""
    stages = {
        simulation.stage.name: {
            "steps": simulation.steps,
            "gpus": simulation.gpus,
            "tokens": simulation.tokens,
            "seconds": {**asdict(simulation.seconds), "total": simulation.seconds.total},
            "rollout_share": simulation.seconds.rollout_share,
            "tokens_per_second_and_gpu": simulation.tokens_per_gpu,
            "duration": simulation.duration,
            "gpu_hours": simulation.gpu_hours,
        }
        for simulation in simulations
    }
    return {"stages": stages, "gpu_hours": sum(simulation.gpu_hours for simulation in simulations)}


def _seconds(value: float) -> str:
    return f"{value:,.1f}" if value else ""
