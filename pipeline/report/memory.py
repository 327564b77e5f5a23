"""`braid plan --memory`: the bytes of a rank, by stage and by pipeline rank, and of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from parallel.memory import (
    RankMemory,
    cache_bytes,
    cached_tokens,
    engine_weights,
    parameter_count,
    reading_memory,
    training_memory,
)
from parallel.settings import EngineSettings, OptimizerSettings
from pipeline.report.tables import indented, layout_text, plain_table
from pipeline.run.graph import Stage, compile_graph
from stages.objectives.advantages.gae import GaeSettings
from stages.settings import LoopSettings, PolicySettings, RunSettings

HEADINGS = ("parameters", "gradients", "optimizer", "frozen models", "activations", "total")


def memory_report(settings: RunSettings) -> Iterator[RenderableType]:
    """Tables and lines for the terminal; nothing of the run needs to exist."""
    one_round = compile_graph(settings.model_copy(update={"rounds": 1}))
    stages = [(stage, stage_memory(stage, settings)) for stage in one_round]
    largest, ranks = max(stages, key=lambda each: fullest(each[1]).total)
    yield _stage_table(settings, stages)
    yield ""
    if settings.layout.pipeline > 1:
        yield _pipeline_table(settings, largest.name, ranks)
        yield ""
    yield from map(Text, _notes(settings, ranks))


def largest_memory(settings: RunSettings, stages: Sequence[Stage]) -> str:
    """What the fullest rank of all needs, and in which stage, in a line."""
    needs = {stage.name: fullest(stage_memory(stage, settings)).total for stage in stages}
    name = max(needs, key=lambda name: needs[name])
    return f"the fullest rank takes {human(needs[name])}, in {name} (--memory has every stage's)"


def stage_memory(stage: Stage, settings: RunSettings) -> list[RankMemory]:
    """What a rank of every pipeline rank holds while the stage runs."""
    if not stage.steps:
        return reading_memory(settings.model, settings.layout)
    optimizer, loop = _trained_by(stage, settings)
    model, layout, tokens = settings.model, settings.layout, loop.micro_batch_tokens
    frozen, averages = _compared_with(stage, settings)
    ranks = training_memory(model, layout, optimizer.algorithm, tokens, frozen, averages)
    rewarded = _rewarded(stage, settings)
    advantage = rewarded.objective.advantage if rewarded else None
    if not isinstance(advantage, GaeSettings):
        return ranks
    algorithm = advantage.critic.optimizer.algorithm
    critic = training_memory(model, layout, algorithm, tokens, values=True)
    return [rank.beside(other) for rank, other in zip(ranks, critic, strict=True)]


def fullest(ranks: list[RankMemory]) -> RankMemory:
    """The rank that needs most, and so decides what fits."""
    return max(ranks, key=lambda rank: rank.total)


def human(count: int) -> str:
    """Bytes to three digits, as in `1.04 MiB`."""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1000 or unit == "TiB":
            break
        size /= 1024
    digits = max(0, 3 - len(str(int(size)))) if unit != "B" else 0
    return f"{size:,.{digits}f} {unit}"


def _trained_by(stage: Stage, settings: RunSettings) -> tuple[OptimizerSettings, LoopSettings]:
    if (policy := _rewarded(stage, settings)) is not None:
        return policy.optimizer, policy.loop
    block = settings.cold_start if stage.kind == "sft" else settings.merge
    assert block is not None
    return block.optimizer, block.loop


def _rewarded(stage: Stage, settings: RunSettings) -> PolicySettings | None:
    """The settings of a stage that learns from rewards."""
    return settings.mixed if stage.kind == "mixed" else settings.domains.get(stage.domain or "")


def _compared_with(stage: Stage, settings: RunSettings) -> tuple[int, int]:
    """How many teachers, or references of a KL penalty, are only read, and how many are averages of
    the policy."""
    if (block := _rewarded(stage, settings)) is not None:
        kl = block.objective.kl
        penalised, average = kl.coefficient > 0, kl.reference == "ema"
        return int(penalised and not average), int(penalised and average)
    return len(stage.teachers), 0


def _stage_table(settings: RunSettings, stages: list[tuple[Stage, list[RankMemory]]]) -> Table:
    where = "the fullest rank" if settings.layout.ranks > 1 else "the rank"
    table = plain_table(f"{settings.name}: memory of {where}, by stage")
    table.add_column("stage")
    _add_headings(table)
    names = indented([stage for stage, _ in stages])
    for stage, ranks in stages:
        table.add_row(names[stage.name], *_cells(fullest(ranks)))
    return table


def _pipeline_table(settings: RunSettings, stage: str, ranks: list[RankMemory]) -> Table:
    table = plain_table(f"{stage}, by pipeline rank")
    for heading in ("pipeline rank", "layers", "also holds"):
        table.add_column(heading)
    _add_headings(table)
    layers = settings.model.layers // settings.layout.pipeline
    also = {0: "embedding", len(ranks) - 1: "output layer"}
    for number, rank in enumerate(ranks):
        table.add_row(str(number), str(layers), also.get(number, ""), *_cells(rank))
    return table


def _add_headings(table: Table) -> None:
    for heading in HEADINGS:
        table.add_column(heading, justify="right")


def _cells(rank: RankMemory) -> list[Text]:
    parts = (rank.parameters, rank.gradients, rank.optimizer, rank.frozen, rank.activations)
    return [Text(human(part) if part else "") for part in parts] + [
        Text(human(rank.total), style="bold")
    ]


def _notes(settings: RunSettings, ranks: list[RankMemory]) -> Iterator[str]:
    model, engine, layout = settings.model, settings.engine, settings.layout
    whole, active = parameter_count(model)
    everywhere = sum(rank.total for rank in ranks) * (layout.ranks // layout.pipeline)
    cache, weights = engine.tensor * cache_bytes(model, engine), engine_weights(model)
    fitting = cached_tokens(model, engine)
    asked = engine.max_sequences * engine.max_model_tokens
    verdict = "enough" if fitting >= asked else "the rest waits"
    yield (
        f"model: {_count(whole)} parameters, {_count(active)} of them used by a token, "
        f"{model.precision}, on {layout_text(layout)}"
    )
    yield f"all ranks of the largest stage: {human(everywhere)}"
    if settings.rounds > 1:
        yield f"each of the {settings.rounds:,} rounds takes what the first does"
    yield (
        f"{_engines(engine)}: {human(weights + cache)} = weights {human(weights)} + KV "
        f"cache {human(cache)},\n  which holds {fitting:,} tokens; {engine.max_sequences} "
        f"sequences of {engine.max_model_tokens} are {asked:,}: {verdict}"
    )
    yield (
        "activations are an estimate of what forward passes keep for backward ones; what kernels\n"
        "  and communication take for a moment comes on top"
    )


def _engines(engine: EngineSettings) -> str:
    which = f"each of {engine.count} engines" if engine.count > 1 else "engine"
    ranks = f" on {engine.tensor} ranks" if engine.tensor > 1 else ""
    return f"{which}, a process of its own{ranks}"


def _count(number: int) -> str:
    """A number of parameters as a person says it: `30.5 B`, `1.05 M`."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
