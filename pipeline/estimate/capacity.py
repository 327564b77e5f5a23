"""The refusal of stages that this machine or a node is too small for, with settings that fit."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any

from parallel.engine.platform import check_cpu_engine
from parallel.errors import UserError
from parallel.estimates.engine_memory import gib
from parallel.estimates.phases import PhaseMemory
from parallel.layout_rules import divisors, tracks_in_bf16
from parallel.machine.gpus import usable_gpus
from parallel.machine.slots import MachineGpus, fits_nodes, share_cores, share_gpus
from pipeline.config.rules import violations
from pipeline.estimate.stage_memory import GpusOf, NodeGpus, stage_phases, trained_by
from pipeline.run.graph import Stage
from stages.kinds.grpo.settings import GrpoSettings
from stages.kinds.rules import At, under
from stages.settings import RunSettings, check_turns

LEAST_TOKENS = 1024  # of a micro-batch that is suggested
LEAST_SEQUENCES = 16  # of an engine that are suggested
HOST_SHARES = (0.5, 1.0)  # of the optimizer's state that are suggested
MOST_RANKS = 1024  # of a layout that is suggested

Change = dict[str, Any]  # values by dotted key


@dataclass(frozen=True)
class Overflow:
    """A phase of a stage that needs more than a GPU has."""

    stage: Stage
    phase: PhaseMemory
    gpus: NodeGpus

    @property
    def over(self) -> int:
        """The bytes too many."""
        return self.phase.needed - self.gpus.gpu_bytes


def check_capacity(settings: RunSettings, stages: Iterable[Stage], gpus_of: GpusOf) -> None:
    """Raise UserError where a stage needs more memory than a GPU has, with a change that fits.

    It names the phase that needs most while an engine is awake, and of the trainer's own. Where the
    GPUs are not known, nothing is refused.
    """
    # Of stages alike the first is named: the last assignment to a key stays, hence both reversals.
    alike = {(stage.kind, stage.block, stage.domain): stage for stage in reversed([*stages])}
    overflows = [
        Overflow(stage, phase, gpus)
        for stage in reversed(alike.values())
        if (gpus := gpus_of(stage.kind)) is not None
        for phase in stage_phases(stage, settings, gpus)
        if phase.needed > gpus.gpu_bytes
    ]
    awake = [overflow for overflow in overflows if overflow.phase.engine_awake]
    asleep = [overflow for overflow in overflows if not overflow.phase.engine_awake]
    if overflows:
        lines = [_message(group, settings) for group in (awake, asleep) if group]
        raise UserError("\n".join(["more memory than a GPU has:", *lines]))


def check_searched(option: str, gpus: int) -> None:
    """Raise UserError for more GPUs than layouts are searched for, which would take minutes."""
    if gpus > MOST_RANKS:
        raise UserError(f"{option} {gpus}: layouts are searched for at most {MOST_RANKS:,} GPUs")


def _message(group: list[Overflow], settings: RunSettings) -> str:
    worst = max(group, key=lambda overflow: overflow.over)
    phase = worst.phase
    reserve = {"reserve": phase.reserve} if phase.reserve else {}
    components = sorted({**phase.gpu, **reserve}.items(), key=lambda component: -component[1])
    listed = ", ".join(f"{name} {gib(count)}" for name, count in components)
    return (
        f"{worst.stage.name}: {phase.phase} needs {gib(phase.needed)} GiB of each {phase.where}, "
        f"{gib(worst.over)} GiB more than its {gib(worst.gpus.gpu_bytes)} ({listed}); "
        f"{_advice(group, settings)}"
    )


def _advice(group: list[Overflow], settings: RunSettings) -> str:
    """Return the first change that lets all phases fit, or else the first two that do."""
    changes = [*_changes(group, settings)]
    pairs = ({**earlier, **later} for earlier, later in combinations(changes, 2))
    for change in chain(changes, pairs):
        if not _excess(group, settings, change):
            return f"set {_shown(change)}"
    return f"no two settings and no layout of {MOST_RANKS:,} ranks make it fit; use larger GPUs"


def _shown(change: Change) -> str:
    """Return a change as overrides of the command line."""
    return " ".join(
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in change.items()
    )


def _excess(group: list[Overflow], settings: RunSettings, change: Change) -> float:
    """Return the bytes that all phases of the stages exceed the GPUs by; infinite if invalid."""
    changed, per_node = changed_settings(settings, change), group[0].gpus.count
    trainer_gpus = -(-changed.layout.ranks // per_node) * per_node  # of whole nodes
    # Shared engines may not take more nodes than the trainer, unless they already do.
    if _engine_gpus(changed) > max(trainer_gpus, _engine_gpus(settings)):
        return math.inf
    if any(violations(changed)):
        return math.inf
    stages = {overflow.stage.name: (overflow.stage, overflow.gpus) for overflow in group}
    return sum(
        max(0, phase.needed - gpus.gpu_bytes)
        for stage, gpus in stages.values()
        for phase in stage_phases(stage, changed, gpus)
        if phase.engine_awake == group[0].phase.engine_awake
    )


def _engine_gpus(settings: RunSettings) -> int:
    """Return the GPUs that the engines take of the trainer's nodes."""
    engine = settings.engine
    return engine.count * engine.ranks if engine.placement == "shared" else 0


def _changes(group: list[Overflow], settings: RunSettings) -> Iterator[Change]:
    """Yield the changes to try, the cheapest first."""
    layout, model, gpus = settings.layout, settings.model, group[0].gpus.count
    larger = [size for size in divisors(model.key_value_heads) if layout.tensor < size <= gpus]
    wider: list[Change] = [{"layout.tensor": size} for size in larger]
    if group[0].phase.engine_awake:
        yield from _engine_changes(settings, gpus)
        # Its logits, of every sequence at once, are all that this makes smaller for certain.
        if any(
            overflow.phase.gpu.get("engine workspace", 0) >= overflow.over for overflow in group
        ):
            yield from _fewer_sequences(settings.engine.max_sequences)
        yield from wider
    else:
        if layout.recompute != "full":
            # Modules to recompute belong to `recompute: selective`.
            modules = {"layout.recompute_modules": ()} if layout.recompute_modules else {}
            yield {"layout.recompute": "full", **modules}
        stages = {overflow.stage.name: overflow.stage for overflow in group}
        yield from training_changes(stages.values(), settings, wider)
    yield from _rank_changes(settings)


def _engine_changes(settings: RunSettings, gpus: int) -> Iterator[Change]:
    """Yield changes of the engines, which fill whole nodes where they are larger than one."""
    engine, model = settings.engine, settings.model
    if engine.kv_cache_mebibytes is not None:
        yield {"engine.kv_cache_mebibytes": None}
    room = engine.count * engine.ranks
    if engine.placement == "shared":
        room = max(room, settings.layout.ranks)
    for size in divisors(model.attention_heads):
        larger = engine.model_copy(update={"tensor": size})
        if size > engine.tensor and fits_nodes(larger, gpus):
            yield {"engine.tensor": size, "engine.count": max(1, room // larger.ranks)}
    if model.precision == "bf16" and engine.weights == "model":
        yield {"engine.weights": "fp8"}


def _fewer_sequences(sequences: int) -> Iterator[Change]:
    """Yield the powers of two below, the largest first."""
    fewer = 1 << max(0, (sequences - 1).bit_length() - 1)
    while fewer >= LEAST_SEQUENCES:
        yield {"engine.max_sequences": fewer}
        fewer //= 2


def training_changes(
    stages: Iterable[Stage], settings: RunSettings, wider: Iterable[Change]
) -> Iterator[Change]:
    """Yield changes of training; the only one of its numerics, bf16 moments, comes last."""
    trained = {
        at("loop"): (at, *trained_by(stage, settings))
        for stage in stages
        if stage.steps
        for at in [_keys(stage, settings)]
    }
    # A row of one sequence is never cut: less than a device's share of it saves nothing.
    least = max(LEAST_TOKENS, -(-settings.engine.max_model_tokens // settings.layout.context))
    tokens = max((loop.micro_batch_tokens for _, _, loop in trained.values()), default=0)
    while (tokens := tokens // 2) >= least:
        yield {at("loop.micro_batch_tokens"): tokens for at, *_ in trained.values()}
    adam = [
        (at, optimizer)
        for at, optimizer, _ in trained.values()
        if optimizer.algorithm == "adam" and settings.layout.distributed_optimizer
    ]
    for share in HOST_SHARES:  # changes no bit, and costs the time of the bus
        if less := [at for at, optimizer in adam if optimizer.cpu_offload < share]:
            yield {at("optimizer.cpu_offload"): share for at in less}
    yield from wider
    low = settings.model.precision == "bf16"
    if fitting := [at for at, optimizer in adam if low and tracks_in_bf16(optimizer)]:
        yield {at("optimizer.precision_aware"): True for at in fitting}


def _keys(stage: Stage, settings: RunSettings) -> At:
    """Return where each setting that a stage trains with is stated."""
    assert stage.block is not None
    block, key = settings.stages[stage.block], f"stages.{stage.block}"
    return block.keys(key, stage.domains) if isinstance(block, GrpoSettings) else under(key)


def _rank_changes(settings: RunSettings) -> Iterator[Change]:
    """Yield more expert parallelism, and more ranks, alone and with as much more of it."""
    layout = settings.layout
    # Expert parallelism alone needs no further GPUs; more ranks do, so they come last.
    for size in divisors(settings.model.experts):
        if size > layout.expert:
            yield {"layout.expert": size}
    factor = 2
    while (ranks := layout.ranks * factor) <= MOST_RANKS:
        yield {"layout.ranks": ranks}
        yield {"layout.ranks": ranks, "layout.expert": layout.expert * factor}
        factor *= 2


def changed_settings(settings: RunSettings, change: Change) -> RunSettings:
    """Return the settings with other values at dotted keys."""
    for key, value in change.items():
        settings = _replaced(settings, key.split("."), value)
    return settings


def _replaced(node: Any, key: list[str], value: Any) -> Any:
    first, *rest = key
    if isinstance(node, dict):
        return {**node, first: _replaced(node[first], rest, value) if rest else value}
    inner = _replaced(getattr(node, first), rest, value) if rest else value
    return node.model_copy(update={first: inner})


@dataclass(frozen=True)
class MachineShare:
    """A stage's and its engines' share of this machine; None is any core, or no GPU."""

    cores: list[int] | None
    gpus: MachineGpus | None


def machine_shares(
    count: int, settings: RunSettings, stages: Sequence[Stage]
) -> list[MachineShare]:
    """Return an equal share of this machine for each of `count` of the stages at a time.

    Raises:
        UserError: there are fewer GPUs or cores than stages, or too few for a stage's processes; or
            engines would need the GPUs of a trainer that computes.
    """
    samples = any(stage.needs_engine for stage in stages)
    if stages and (gpus := usable_gpus()):
        if (per_stage := len(gpus) // count) == 0:
            raise UserError(f"--parallel {count} needs {count} GPUs, {len(gpus)} available")
        if any(stage.takes_turns for stage in stages):
            check_turns(settings)
        layout, engine = settings.layout, settings.engine if samples else None
        starts = range(0, count * per_stage, per_stage)
        shares = [(gpus[start : start + per_stage], start) for start in starts]
        return [MachineShare(None, share_gpus(layout, engine, *share)) for share in shares]
    cores = sorted(os.sched_getaffinity(0))
    if (per_stage := len(cores) // count) == 0:
        raise UserError(f"--parallel {count} needs {count} CPU cores, {len(cores)} available")
    if samples:
        check_cpu_engine(settings.model)
        share_cores(settings.engine, cores[:per_stage])
    if count == 1:
        return [MachineShare(None, None)]
    return [
        MachineShare(cores[slot * per_stage : (slot + 1) * per_stage], None)
        for slot in range(count)
    ]
