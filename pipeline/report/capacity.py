"""The refusal of stages that need more memory than their GPUs have, with settings that fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from parallel.engine.memory import gib
from parallel.errors import UserError
from parallel.phases import PhaseMemory
from parallel.settings import divisors, layout_violations
from parallel.weights.needs import engine_violations
from pipeline.report.gpu_memory import GpusOf, NodeGpus, stage_phases
from pipeline.report.stage_memory import trained_by
from pipeline.run.graph import Stage
from stages.kinds import settings_key
from stages.settings import RunSettings

LEAST_TOKENS = 1024  # of a micro-batch that is suggested
MOST_RANKS = 1024  # of a layout that is suggested
ENGINE_PHASES = ("generate", "weight sync")

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
        return self.phase.total - self.gpus.each


def check_capacity(settings: RunSettings, stages: Iterable[Stage], gpus_of: GpusOf) -> None:
    """Raise UserError where a stage needs more memory than a GPU has, with a change that fits.

    Of stages that exceed it in the same phase, the one that needs most is named. Where the GPUs are
    not known, nothing is refused.
    """
    worst: dict[str, Overflow] = {}
    alike = {(stage.kind, stage.domain): stage for stage in reversed([*stages])}  # of any round
    for stage in reversed(alike.values()):
        for found in _overflows(stage, settings, gpus_of):
            other = worst.get(found.phase.phase)
            if other is None or found.over > other.over:
                worst[found.phase.phase] = found
    if worst:
        lines = [_message(found, settings) for found in worst.values()]
        raise UserError("\n".join(["more memory than a GPU has:", *lines]))


def _overflows(stage: Stage, settings: RunSettings, gpus_of: GpusOf) -> list[Overflow]:
    if (gpus := gpus_of(stage.kind)) is None:
        return []
    found = [Overflow(stage, phase, gpus) for phase in stage_phases(stage, settings, gpus)]
    return [each for each in found if each.over > 0]


def _message(found: Overflow, settings: RunSettings) -> str:
    phase = found.phase
    parts = sorted(phase.gpu.items(), key=lambda each: -each[1])
    listed = ", ".join(f"{name} {gib(count)}" for name, count in parts)
    return (
        f"{found.stage.name}: {phase.phase} needs {gib(phase.total)} GiB of each {phase.where}, "
        f"{gib(found.over)} GiB more than its {gib(found.gpus.each)} ({listed}); "
        f"{_advice(found, settings)}"
    )


def _advice(found: Overflow, settings: RunSettings) -> str:
    """Return the first change that lets the phase fit, or else the first that do so together."""
    for ways in _ways(found, settings):
        for change in ways:
            if _fits(found, _with(settings, change)):
                return f"set {_shown(change)}"
    changed, together = settings, Change()
    for ways in _ways(found, settings):
        for change in ways:
            trial = _with(changed, change)
            if _legal(trial) and _need(found, trial) < _need(found, changed):
                changed, together = trial, {**together, **change}
                if _fits(found, changed):
                    return f"set {_shown(together)}"
    return f"no layout of up to {MOST_RANKS:,} ranks and no other setting fits; use larger GPUs"


def _shown(change: Change) -> str:
    return " ".join(f"{key}={str(value).lower()}" for key, value in change.items())


def _fits(found: Overflow, settings: RunSettings) -> bool:
    return _legal(settings) and _need(found, settings) <= found.gpus.each


def _need(found: Overflow, settings: RunSettings) -> int:
    phases = stage_phases(found.stage, settings, found.gpus)
    return next(each.total for each in phases if each.phase == found.phase.phase)


def _legal(settings: RunSettings) -> bool:
    model = settings.model
    broken = layout_violations(model, settings.layout)
    return not broken and not engine_violations(model, settings.engine.tensor)


def _ways(found: Overflow, settings: RunSettings) -> Iterator[Iterable[Change]]:
    """Yield the changes to try, the cheapest first; those of one group exclude each other."""
    if found.phase.phase in ENGINE_PHASES:
        yield from _engine_ways(found, settings)
        return
    layout, model = settings.layout, settings.model
    if layout.recompute != "full":
        yield [{"layout.recompute": "full"}]
    larger = [size for size in divisors(model.key_value_heads) if size > layout.tensor]
    wider = [{"layout.tensor": size} for size in larger if size <= found.gpus.count]
    if not found.stage.steps:
        yield wider
    else:
        yield from _training_ways(found.stage, settings, wider)
    yield from _rank_ways(settings)


def _engine_ways(found: Overflow, settings: RunSettings) -> Iterator[Iterable[Change]]:
    engine, model = settings.engine, settings.model
    if engine.kv_cache_mebibytes is not None:
        yield [{"engine.kv_cache_mebibytes": None}]
    larger = [size for size in divisors(model.attention_heads) if size > engine.tensor]
    yield [{"engine.tensor": size} for size in larger if size <= found.gpus.count]
    if model.precision == "bf16" and engine.weights == "model":
        yield [{"engine.weights": "fp8"}]


def _training_ways(
    stage: Stage, settings: RunSettings, wider: Iterable[Change]
) -> Iterator[Iterable[Change]]:
    block = "merge" if stage.kind == "distill" else settings_key(stage.name)
    optimizer, loop = trained_by(stage, settings)
    adam = optimizer.algorithm == "adam" and settings.layout.distributed_optimizer
    if adam and settings.model.precision == "bf16" and not optimizer.precision_aware:
        yield [{f"{block}.optimizer.precision_aware": True}]
    yield wider
    least = max(LEAST_TOKENS, settings.engine.max_model_tokens)
    halves = [loop.micro_batch_tokens // part for part in (2, 4, 8)]
    yield [{f"{block}.loop.micro_batch_tokens": each} for each in halves if each >= least]
    if adam and optimizer.cpu_offload < 1:
        yield [{f"{block}.optimizer.cpu_offload": 1.0}]


def _rank_ways(settings: RunSettings) -> Iterator[Iterable[Change]]:
    """Yield more expert parallelism, and more ranks, alone and with as much more of it."""
    layout, experts = settings.layout, settings.model.experts
    yield [{"layout.expert": size} for size in divisors(experts) if size > layout.expert]
    factors = [1 << power for power in range(1, MOST_RANKS.bit_length())]
    factors = [factor for factor in factors if layout.ranks * factor <= MOST_RANKS]
    more = [{"layout.ranks": layout.ranks * factor} for factor in factors]
    yield [
        change
        for factor, ranks in zip(factors, more, strict=True)
        for change in (ranks, {**ranks, "layout.expert": layout.expert * factor})
    ]


def _with(settings: RunSettings, change: Change) -> RunSettings:
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
