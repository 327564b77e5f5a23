"""`braid plan --memory`: bytes of a rank by stage and by pipeline rank, and of an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parallel.memory import (
    RankMemory,
    cache_bytes,
    cached_tokens,
    engine_weights,
    parameter_count,
    reading_memory,
    training_memory,
)
from parallel.settings import EngineSettings, OptimizerSettings, chunk_layers
from pipeline.report.tables import Cell, human, indented, layout_text, table
from pipeline.run.graph import Stage, compile_graph
from stages.objectives.advantages.gae import GaeSettings
from stages.settings import LoopSettings, PolicySettings, RunSettings

HEADINGS = ("parameters", "gradients", "optimizer", "frozen models", "activations", "total")


def memory_report(settings: RunSettings) -> Iterator[str]:
    """Yield the tables and lines to print; nothing of the run needs to exist."""
    one_round = compile_graph(settings.model_copy(update={"rounds": 1}))
    stages = [(stage, stage_memory(stage, settings)) for stage in one_round]
    largest, ranks = max(stages, key=lambda each: fullest(each[1]).total)
    where = "the fullest rank" if settings.layout.ranks > 1 else "the rank"
    names = indented(one_round)
    rows: list[tuple[str | Cell, ...]] = [
        (names[stage.name], *_cells(fullest(held))) for stage, held in stages
    ]
    title = f"{settings.name}: memory of {where}, by stage"
    yield table(title, ("stage", *HEADINGS), rows, right=range(1, 7))
    yield ""
    if settings.layout.pipeline > 1:
        chunks = [len(layers) for layers in chunk_layers(settings.model, settings.layout)]
        layers = [str(sum(chunks[rank :: len(ranks)])) for rank in range(len(ranks))]
        also = {0: "embedding", len(ranks) - 1: "output layer"}
        parts: list[tuple[str | Cell, ...]] = [
            (str(number), layers[number], also.get(number, ""), *_cells(rank))
            for number, rank in enumerate(ranks)
        ]
        headings = ("pipeline rank", "layers", "also holds", *HEADINGS)
        yield table(f"{largest.name}, by pipeline rank", headings, parts, right=range(3, 9))
        yield ""
    yield from _notes(settings, ranks)


def largest_memory(settings: RunSettings, stages: Sequence[Stage]) -> str:
    """Return the memory of the fullest rank of all stages, and its stage, in a line."""
    needs = {stage.name: fullest(stage_memory(stage, settings)).total for stage in stages}
    name = max(needs, key=lambda name: needs[name])
    return f"the fullest rank needs {human(needs[name])}, in {name} (--memory shows every stage)"


def stage_memory(stage: Stage, settings: RunSettings) -> list[RankMemory]:
    """Return the memory of a rank of every pipeline rank while the stage runs."""
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
    """Return the rank that needs most, which decides what fits."""
    return max(ranks, key=lambda rank: rank.total)


def _trained_by(stage: Stage, settings: RunSettings) -> tuple[OptimizerSettings, LoopSettings]:
    if (policy := _rewarded(stage, settings)) is not None:
        return policy.optimizer, policy.loop
    block = settings.cold_start if stage.kind == "sft" else settings.merge
    assert block is not None
    return block.optimizer, block.loop


def _rewarded(stage: Stage, settings: RunSettings) -> PolicySettings | None:
    """Return the settings of a stage that learns from rewards, None of another one."""
    return settings.mixed if stage.kind == "mixed" else settings.domains.get(stage.domain or "")


def _compared_with(stage: Stage, settings: RunSettings) -> tuple[int, int]:
    """Return the number of frozen teachers or references, and of moving averages of the policy."""
    if (block := _rewarded(stage, settings)) is not None:
        kl = block.objective.kl
        penalised, average = kl.coefficient > 0, kl.reference == "ema"
        return int(penalised and not average), int(penalised and average)
    return len(stage.teachers), 0


def _cells(rank: RankMemory) -> list[Cell]:
    parts = (rank.parameters, rank.gradients, rank.optimizer, rank.frozen, rank.activations)
    return [Cell(human(part) if part else "") for part in parts] + [Cell(human(rank.total), "bold")]


def _notes(settings: RunSettings, ranks: list[RankMemory]) -> Iterator[str]:
    model, engine, layout = settings.model, settings.engine, settings.layout
    whole, active = parameter_count(model)
    everywhere = sum(rank.total for rank in ranks) * (layout.ranks // layout.pipeline)
    cache, weights = engine.tensor * cache_bytes(model, engine), engine_weights(model)
    fitting = cached_tokens(model, engine)
    asked = engine.max_sequences * engine.max_model_tokens
    verdict = "all fit" if fitting >= asked else "the rest waits"
    yield (
        f"model: {_count(whole)} parameters, {_count(active)} of them used by a token, "
        f"{model.precision}, on {layout_text(layout)}"
    )
    yield f"all ranks of the largest stage: {human(everywhere)}"
    if settings.rounds > 1:
        yield f"each of the {settings.rounds:,} rounds needs as much as the first"
    yield (
        f"{_engines(engine)}: {human(weights + cache)} = weights {human(weights)} + KV "
        f"cache {human(cache)},\n  which holds {fitting:,} tokens; {engine.max_sequences} "
        f"sequences of {engine.max_model_tokens} are {asked:,}: {verdict}"
    )
    yield (
        "activations are an estimate of what backward passes need; temporary buffers of kernels\n"
        "  and communication come on top"
    )


def _engines(engine: EngineSettings) -> str:
    which = f"each of {engine.count} engines" if engine.count > 1 else "engine"
    ranks = f" on {engine.tensor} ranks" if engine.tensor > 1 else ""
    return f"{which}, a separate process{ranks}"


def _count(number: int) -> str:
    """Return a number of parameters in words: `30.5 B`, `1.05 M`."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
