"""`braid plan --memory`: bytes of a rank by stage and by pipeline rank, and of an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from parallel.estimates.engine_memory import (
    GIB,
    cache_bytes,
    engine_weights,
    gib,
    response_bytes,
    tokens_in,
)
from parallel.estimates.memory import RankMemory
from parallel.estimates.phases import PhaseMemory, checkpoint_copies
from parallel.estimates.tensor_sizes import parameter_count
from parallel.layout_rules import chunk_layers
from pipeline.estimate.gpu_memory import GpusOf, NodeGpus, stage_phases
from pipeline.estimate.stage_memory import samples_per_step, stage_memory, stage_models, trained_by
from pipeline.run.graph import Stage, compile_graph
from pipeline.tables import Cell, human, indented, layout_text, table
from stages.settings import RunSettings

HEADINGS = ("parameters", "gradients", "optimizer", "frozen models", "activations", "total")


def memory_report(settings: RunSettings, gpus_of: GpusOf = lambda _: None) -> Iterator[str]:
    """Yield the tables and lines to print; nothing of the run needs to exist.

    Where the GPUs are known, the phases of the stage that needs most of one follow.
    """
    graph = compile_graph(settings)
    memory = [(stage, stage_memory(stage, settings)) for stage in graph]
    largest, ranks = max(memory, key=lambda of_stage: fullest(of_stage[1]).total)
    where = "the fullest rank" if settings.layout.ranks > 1 else "the rank"
    names = indented(graph)
    rows: list[tuple[str | Cell, ...]] = [
        (names[stage.name], *_cells(fullest(of_stage))) for stage, of_stage in memory
    ]
    title = f"{settings.name}: memory of {where}, by stage"
    yield table(title, ("stage", *HEADINGS), rows, right=range(1, 7))
    yield ""
    if settings.layout.pipeline > 1:
        yield from _rank_table(settings, largest, ranks)
    on_gpus = [
        (stage, gpus, stage_phases(stage, settings, gpus))
        for stage in graph
        if (gpus := gpus_of(stage.kind)) is not None
    ]
    caches = [
        phase.gpu["KV cache"]
        for *_, phases in on_gpus
        for phase in phases
        if "KV cache" in phase.gpu
    ]
    cached = min(caches, default=cache_bytes(settings.model, settings.engine))
    yield from _notes(settings, ranks, cached)
    yield from _response_notes(settings, graph)
    if on_gpus:
        stage, gpus, phases = max(on_gpus, key=lambda of_stage: _tightness(*of_stage[1:]))
        yield ""
        yield from _phase_table(stage, gpus, phases)
        yield from _host_table(stage, settings, gpus, phases)


def _rank_table(settings: RunSettings, stage: Stage, ranks: Sequence[RankMemory]) -> Iterator[str]:
    """Yield the table of a stage's memory by pipeline rank."""
    chunks = [len(layers) for layers in chunk_layers(settings.model, settings.layout)]
    layers = [str(sum(chunks[rank :: len(ranks)])) for rank in range(len(ranks))]
    also = {0: "embedding", len(ranks) - 1: "output layer"}
    rows: list[tuple[str | Cell, ...]] = [
        (str(number), layers[number], also.get(number, ""), *_cells(rank))
        for number, rank in enumerate(ranks)
    ]
    headings = ("pipeline rank", "layers", "also holds", *HEADINGS)
    yield table(f"{stage.name}, by pipeline rank", headings, rows, right=range(3, 9))
    yield ""


def _tightness(gpus: NodeGpus, phases: Sequence[PhaseMemory]) -> tuple[int, int]:
    """Return the excess of a stage's tightest phase over a GPU, and the sum of its phases."""
    totals = [phase.total for phase in phases]
    return max(totals) - gpus.gpu_bytes, sum(totals)


def _phase_table(stage: Stage, gpus: NodeGpus, phases: Sequence[PhaseMemory]) -> Iterator[str]:
    """Yield the table of a stage's phases: the components on a GPU."""
    names = dict.fromkeys(name for phase in phases for name in phase.gpu)
    rows = [_gib_row(name, [phase.gpu.get(name, 0) for phase in phases]) for name in names]
    totals = [phase.total for phase in phases]
    rows.append(_gib_row("total", totals, "bold"))
    rows.append(_gib_row("free", [gpus.gpu_bytes - total for total in totals]))
    headings = ["component"]
    for phase in phases:
        headings.append(phase.phase if phase.where == "GPU" else f"{phase.phase} ({phase.where})")
    title = f"{stage.name}: GiB on a GPU in each phase of a step; a GPU has {gib(gpus.gpu_bytes)}"
    yield table(title, headings, rows, right=range(1, len(headings)))
    yield ""


def _host_table(
    stage: Stage, settings: RunSettings, gpus: NodeGpus, phases: Sequence[PhaseMemory]
) -> Iterator[str]:
    """Yield the table of a rank's bytes on the host; only one kind of checkpoint is there."""
    names = dict.fromkeys(name for phase in phases for name in phase.host)
    host_bytes = {name: max(phase.host.get(name, 0) for phase in phases) for name in names}
    if stage.steps:
        copies = [checkpoint_copies(models).items() for models in stage_models(stage, settings)]
        name, count = max(chain.from_iterable(copies), key=lambda copy: copy[1])
        host_bytes[name] = count
    if not host_bytes:
        return
    ranks = min(settings.layout.ranks, gpus.count)
    rows = [_gib_row(name, [count, ranks * count]) for name, count in host_bytes.items()]
    total = sum(host_bytes.values())
    rows.append(_gib_row("total", [total, ranks * total], "bold"))
    headings = ("component", "a rank", f"{ranks} rank{'s' if ranks > 1 else ''} of a node")
    yield table(f"{stage.name}: GiB on the host", headings, rows, right=range(1, 3))
    yield ""


def _gib_row(name: str, counts: Sequence[int], style: str = "") -> list[str | Cell]:
    return [name, *(Cell(f"{count / GIB:,.2f}" if count else "", style) for count in counts)]


def largest_memory(settings: RunSettings, stages: Sequence[Stage]) -> str:
    """Return the memory of the fullest rank of all stages, and its stage, in a line."""
    needs = {stage.name: fullest(stage_memory(stage, settings)).total for stage in stages}
    name = max(needs, key=lambda name: needs[name])
    return f"the fullest rank needs {human(needs[name])}, in {name} (--memory shows every stage)"


def fullest(ranks: list[RankMemory]) -> RankMemory:
    """Return the rank that needs most, which decides what fits."""
    return max(ranks, key=lambda rank: rank.total)


def _cells(rank: RankMemory) -> list[Cell]:
    components = (rank.parameters, rank.gradients, rank.optimizer, rank.frozen, rank.activations)
    return [Cell(human(count) if count else "") for count in components] + [
        Cell(human(rank.total), "bold")
    ]


def _notes(settings: RunSettings, ranks: list[RankMemory], cached: int) -> Iterator[str]:
    model, engine, layout = settings.model, settings.engine, settings.layout
    whole, active = parameter_count(model)
    everywhere = sum(rank.total for rank in ranks) * (layout.ranks // layout.pipeline)
    cache = engine.ranks * cached
    weights = engine.ranks * engine_weights(model, engine)
    fitting = engine.data * tokens_in(cached, model, engine)
    sequences = engine.data * engine.max_sequences
    needed = sequences * engine.max_model_tokens
    verdict = "all fit" if fitting >= needed else "the rest waits"
    which = f"each of {engine.count} engines" if engine.count > 1 else "engine"
    on_ranks = f" on {engine.ranks} ranks" if engine.ranks > 1 else ""
    yield (
        f"model: {_count(whole)} parameters, {_count(active)} of them used by a token, "
        f"{model.precision}, on {layout_text(layout)}"
    )
    yield f"all ranks of the largest stage: {human(everywhere)}"
    if on_host := max(rank.host_optimizer for rank in ranks):
        yield f"besides, on the host of the fullest rank: {human(on_host)} of optimizer state"
    yield (
        f"{which}, a separate process{on_ranks}: {human(weights + cache)} = weights "
        f"{human(weights)} + KV cache {human(cache)},\n  which holds {fitting:,} tokens; "
        f"{sequences} sequences of {engine.max_model_tokens} are {needed:,}: {verdict}"
    )
    yield (
        "activations are an estimate of what backward passes need; temporary buffers of kernels\n"
        "  and communication come on top"
    )


def _response_notes(settings: RunSettings, stages: Sequence[Stage]) -> Iterator[str]:
    """Yield how much the responses of a step, and of all steps until a checkpoint, take at most."""
    longest, most = settings.engine.max_model_tokens, (0, 0, "")
    for stage in stages:
        if stage.steps and stage.needs_engine:
            tokens = samples_per_step(stage, settings) * longest
            step, loop = tokens * response_bytes(settings.model), trained_by(stage, settings)[1]
            most = max(most, (step * loop.checkpoint_every, step, stage.name))
    logged, step, name = most
    if not step:
        return
    yield (
        f"responses of a step of {name}, in rank 0's host memory: at most {human(step)}, if all"
        f" have {longest}\n  tokens, mostly their experts"
    )
    if settings.logging.response_log:
        yield (
            f"its response log on disk until a checkpoint: at most {human(logged)};"
            " logging.response_log: false keeps none"
        )


def _count(number: int) -> str:
    """Return a number of parameters in words: `30.5 B`, `1.05 M`."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
