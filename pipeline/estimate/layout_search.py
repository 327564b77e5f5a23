"""The layouts of a run on a number of GPUs that its simulation finds fastest."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from parallel.engine_rules import engine_rules
from parallel.estimates.roofline.step import StepSeconds
from parallel.estimates.roofline.work import StepWorkload
from parallel.families import family_violations
from parallel.layout_rules import divisors, layout_violations
from parallel.machine.slots import fits_nodes
from parallel.settings import EngineSettings, LayoutSettings
from pipeline.config.yaml_core import dump_line
from pipeline.estimate.simulation import HOUR, Assumptions, without_sync, workload
from pipeline.estimate.stage_memory import NodeGpus, stage_phases
from pipeline.run.graph import Stage
from pipeline.tables import Cell, table
from pipeline.text import clock
from stages.settings import RunSettings

MOST_TENSOR, MOST_CONTEXT = 8, 32  # of a policy's ranks; tensor parallelism stays in a node
MOST_ENGINE_TENSOR = 32
SPLITS = (0.25, 0.5, 0.75)  # of the GPUs for the trainer, where engines have their own
FILLED_AT_MOST = 0.9  # of a GPU's memory that may be filled
CHOSEN = {
    "layout": (
        *("ranks", "tensor", "context", "pipeline", "first_stage_layers", "last_stage_layers"),
        *("expert", "expert_tensor", "recompute"),
    ),
    "engine": ("count", "tensor"),
}
# Keys that a search does not vary: all layouts have these values, whatever was given.
RESET: dict[str, dict[str, Any]] = {
    "layout": {"virtual_pipeline": 1, "recompute_modules": ()},
    "engine": {"data": 1},
}
HEADINGS = ("time", "GPU hours", "fullest phase", "settings")


@dataclass(frozen=True)
class FoundLayout:
    """A layout with the seconds of all steps, and the share of a GPU that its phases need.

    `original` are the settings that were searched with.
    """

    original: RunSettings
    settings: RunSettings
    seconds: float
    filled: float

    @property
    def overrides(self) -> list[str]:
        """The keys chosen, as overrides of the command line, and those reset from other values."""
        overrides = []
        for block, keys in CHOSEN.items():
            before, after = (
                getattr(settings, block).model_dump(mode="json")
                for settings in (self.original, self.settings)
            )
            reset = [key for key in RESET[block] if after[key] != before[key]]
            overrides += [f"{block}.{key}={dump_line(after[key])}" for key in (*keys, *reset)]
        return overrides


def node_of(assumed: Assumptions, kind: str, share: float = 1.0) -> NodeGpus:
    """Return the GPUs of a node of a kind of stage, each with this share of its memory."""
    return NodeGpus(assumed.per_node, int(share * assumed.sheet(kind).memory_bytes))


def best_layouts(
    stages: Sequence[Stage], settings: RunSettings, gpus: int, assumed: Assumptions, most: int
) -> list[FoundLayout]:
    """Return up to `most` legal layouts on this number of GPUs that fit, the fastest first.

    Layouts of the policy and of the engines are timed apart: neither changes the other's seconds.
    """
    trained = _distinct(stages, settings, assumed)
    checked = _checked(stages, trained, assumed)
    assumed = replace(assumed, per_node=min(assumed.per_node, gpus))
    layouts: list[FoundLayout] = []
    for ranks, for_engines in _splits(settings.engine, gpus):
        layouts += _of_split(trained, checked, settings, ranks, for_engines, assumed, most)
    return sorted(layouts, key=lambda layout: layout.seconds)[:most]


def _of_split(
    trained: Sequence[tuple[Stage, int]],
    checked: Sequence[Stage],
    settings: RunSettings,
    ranks: int,
    for_engines: int,
    assumed: Assumptions,
    most: int,
) -> list[FoundLayout]:
    """Return the fastest layouts with this number of ranks and of the engines' GPUs.

    The `checked` stages fit into their memory.
    """
    layouts = [*_layouts(settings, ranks)]
    fleets = [*_fleets(settings, for_engines, assumed.per_node)]
    if not layouts or not fleets:
        return []
    by_layout = [_steps(trained, _with(settings, layout, fleets[0]), assumed) for layout in layouts]
    by_fleet = [_steps(trained, _with(settings, layouts[0], fleet), assumed) for fleet in fleets]
    counts = [stage.steps * alike for stage, alike in trained if stage.steps]
    timed = [
        (
            sum(
                count * replace(one, rollout=other.rollout).total
                for count, one, other in zip(counts, training, sampling, strict=True)
            ),
            layout,
            fleet,
        )
        for (training, layout), (sampling, fleet) in product(
            zip(by_layout, layouts, strict=True), zip(by_fleet, fleets, strict=True)
        )
    ]
    # The fastest first, until enough fit: there may be thousands, and counting memory is slow.
    fitting: list[FoundLayout] = []
    for seconds, layout, fleet in sorted(timed, key=lambda timing: timing[0]):
        changed = _with(settings, layout, fleet)
        filled = fullest_share(checked, changed, assumed, FILLED_AT_MOST)
        if filled <= 1:
            fitting.append(FoundLayout(settings, changed, seconds, filled * FILLED_AT_MOST))
        if len(fitting) == most:
            break
    return fitting


def _distinct(
    stages: Sequence[Stage], settings: RunSettings, assumed: Assumptions
) -> list[tuple[Stage, int]]:
    """Return the first of the stages that have the same steps, and how many there are."""
    by_work: dict[tuple[str | None, int, StepWorkload], list[Stage]] = {}
    for stage in stages:
        if stage.steps:
            key = stage.block, stage.steps, workload(stage, settings, assumed)
            by_work.setdefault(key, []).append(stage)
    return [(alike[0], len(alike)) for alike in by_work.values()]


def _steps(
    trained: Sequence[tuple[Stage, int]], settings: RunSettings, assumed: Assumptions
) -> list[StepSeconds]:
    return [without_sync(stage, settings, assumed).seconds for stage, _ in trained]


def _checked(
    stages: Sequence[Stage], trained: Sequence[tuple[Stage, int]], assumed: Assumptions
) -> list[Stage]:
    """Return the stages whose memory is checked: those that train, which need most of any GPU.

    And one of each other kind that has other GPUs.
    """
    checked = [stage for stage, _ in trained]
    kinds = assumed.kinds.keys() - {stage.kind for stage in checked}
    return [*checked, *{stage.kind: stage for stage in stages if stage.kind in kinds}.values()]


def fullest_share(
    stages: Sequence[Stage],
    settings: RunSettings,
    assumed: Assumptions,
    share: float = 1.0,
    asleep: bool = False,
) -> float:
    """Return the bytes of the stages' fullest phase over this share of a GPU's memory.

    With `asleep` only phases count in which no engine is awake.
    """
    return max(
        phase.needed / node.gpu_bytes
        for stage in stages
        for node in [node_of(assumed, stage.kind, share)]
        for phase in stage_phases(stage, settings, node)
        if not (asleep and phase.engine_awake)
    )


def _splits(engine: EngineSettings, gpus: int) -> Iterator[tuple[int, int]]:
    """Yield the trainer's ranks and the GPUs of the engines."""
    if engine.placement == "shared":
        yield gpus, gpus
        return
    for share in SPLITS:
        if 0 < (ranks := round(share * gpus)) < gpus:
            yield ranks, gpus - ranks


def _layouts(settings: RunSettings, ranks: int) -> Iterator[LayoutSettings]:
    """Yield the legal layouts of this number of ranks."""
    model = settings.model
    for tensor, context, pipeline, expert, recompute in product(
        [size for size in divisors(model.key_value_heads) if size <= MOST_TENSOR],
        [1 << power for power in range(MOST_CONTEXT.bit_length())],
        [size for size in divisors(ranks) if size <= model.layers],
        divisors(model.experts),
        ("none", "full"),
    ):
        if ranks % (tensor * context * pipeline) or ranks % (expert * pipeline):
            continue
        layout = settings.layout.model_copy(
            update={
                **{"ranks": ranks, "tensor": tensor, "context": context, "pipeline": pipeline},
                **{"expert": expert, "expert_tensor": 1, "recompute": recompute},
                **_ends(model.layers, pipeline),
                **RESET["layout"],
            }
        )
        if not any((*layout_violations(model, layout), *family_violations(model, layout))):
            yield layout


def _ends(layers: int, pipeline: int) -> dict[str, int | None]:
    """Return the layers of the first and the last stage, which are fewer where they must be.

    The last stage has the output head besides, the first the embedding.
    """
    first_layers = last_layers = None
    if layers % pipeline and pipeline > 2:
        middle_layers = -(-layers // pipeline)
        missing = middle_layers * pipeline - layers
        first_layers = middle_layers - missing // 2
        last_layers = middle_layers - (missing - missing // 2)
        if min(first_layers, last_layers) < 1:
            middle_layers -= 1  # then both ends have more
            left = layers - middle_layers * (pipeline - 2)
            first_layers, last_layers = left // 2 + left % 2, left // 2
    return {"first_stage_layers": first_layers, "last_stage_layers": last_layers}


def _fleets(settings: RunSettings, gpus: int, per_node: int) -> Iterator[EngineSettings]:
    """Yield the engines that fill this number of GPUs."""
    for tensor in divisors(settings.model.attention_heads):
        engine = settings.engine.model_copy(
            update={"count": gpus // tensor, "tensor": tensor, **RESET["engine"]}
        )
        if tensor > min(gpus, MOST_ENGINE_TENSOR) or gpus % tensor:
            continue
        if not any(engine_rules(settings.model, engine)) and fits_nodes(engine, per_node):
            yield engine


def _with(settings: RunSettings, layout: LayoutSettings, engine: EngineSettings) -> RunSettings:
    return settings.model_copy(update={"layout": layout, "engine": engine})


def search_text(found_layouts: Sequence[FoundLayout], gpus: int) -> str:
    """Return the table of layouts."""
    rows: list[list[str | Cell]] = [
        [
            clock(layout.seconds),
            f"{layout.seconds * gpus / HOUR:,.0f}",
            f"{layout.filled:.0%}",
            shlex.join(layout.overrides),
        ]
        for layout in found_layouts
    ]
    return table(f"the fastest layouts of {gpus} GPUs", HEADINGS, rows, right=range(3))


def search_json(found_layouts: Sequence[FoundLayout], gpus: int) -> dict[str, Any]:
    """Return what `braid simulate --search --json` prints."""
    return {
        "layouts": [
            {
                "overrides": layout.overrides,
                "duration": layout.seconds,
                "gpu_hours": layout.seconds * gpus / HOUR,
                "filled": layout.filled,
            }
            for layout in found_layouts
        ]
    }
