"""The layouts of a run on a number of GPUs that its simulation finds fastest."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from parallel.estimates.roofline.step import StepSeconds
from parallel.estimates.roofline.work import StepWorkload
from parallel.families import family_violations
from parallel.layout_rules import divisors, layout_violations
from parallel.machine.slots import fits_nodes
from parallel.settings import EngineSettings, LayoutSettings
from pipeline.config.engine_rules import engine_rules
from pipeline.config.yaml_core import dump_line
from pipeline.estimate.gpu_memory import NodeGpus, stage_phases
from pipeline.estimate.simulation import HOUR, Assumptions, without_sync, workload
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

    `given` are the settings that were searched with.
    """

    given: RunSettings
    settings: RunSettings
    seconds: float
    filled: float

    @property
    def overrides(self) -> list[str]:
        """The keys chosen, as overrides of the command line, and those reset from other values."""
        found = []
        for block, keys in CHOSEN.items():
            before, after = (
                getattr(each, block).model_dump(mode="json") for each in (self.given, self.settings)
            )
            reset = [key for key in RESET[block] if after[key] != before[key]]
            found += [f"{block}.{key}={dump_line(after[key])}" for key in (*keys, *reset)]
        return found


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
    found: list[FoundLayout] = []
    for ranks, for_engines in _splits(settings.engine, gpus):
        found += _of_split(trained, checked, settings, ranks, for_engines, assumed, most)
    return sorted(found, key=lambda each: each.seconds)[:most]


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
    by_layout = [_steps(trained, _with(settings, each, fleets[0]), assumed) for each in layouts]
    by_fleet = [_steps(trained, _with(settings, layouts[0], each), assumed) for each in fleets]
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
    found: list[FoundLayout] = []
    for seconds, layout, fleet in sorted(timed, key=lambda each: each[0]):
        changed = _with(settings, layout, fleet)
        filled = _filled(checked, changed, assumed)
        if filled <= 1:
            found.append(FoundLayout(settings, changed, seconds, filled * FILLED_AT_MOST))
        if len(found) == most:
            break
    return found


def _distinct(
    stages: Sequence[Stage], settings: RunSettings, assumed: Assumptions
) -> list[tuple[Stage, int]]:
    """Return the first of the stages that have the same steps, and how many there are."""
    found: dict[tuple[str | None, int, StepWorkload], list[Stage]] = {}
    for stage in stages:
        if stage.steps:
            key = stage.block, stage.steps, workload(stage, settings, assumed)
            found.setdefault(key, []).append(stage)
    return [(alike[0], len(alike)) for alike in found.values()]


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
    found = [stage for stage, _ in trained]
    kinds = assumed.kinds.keys() - {stage.kind for stage in found}
    return [*found, *{stage.kind: stage for stage in stages if stage.kind in kinds}.values()]


def _filled(checked: Sequence[Stage], settings: RunSettings, assumed: Assumptions) -> float:
    """Return the bytes of the fullest phase of all stages over those that may be filled."""
    return max(
        (phase.total + phase.reserve) / node.each
        for stage in checked
        for node in [node_of(assumed, stage.kind, FILLED_AT_MOST)]
        for phase in stage_phases(stage, settings, node)
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
    first = last = None
    if layers % pipeline and pipeline > 2:
        each = -(-layers // pipeline)
        missing = each * pipeline - layers
        first, last = each - missing // 2, each - (missing - missing // 2)
        if min(first, last) < 1:
            each -= 1  # then both ends have more
            left = layers - each * (pipeline - 2)
            first, last = left // 2 + left % 2, left // 2
    return {"first_stage_layers": first, "last_stage_layers": last}


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


def search_text(found: Sequence[FoundLayout], gpus: int) -> str:
    """Return the table of layouts."""
    rows: list[list[str | Cell]] = [
        [
            clock(each.seconds),
            f"{each.seconds * gpus / HOUR:,.0f}",
            f"{each.filled:.0%}",
            shlex.join(each.overrides),
        ]
        for each in found
    ]
    return table(f"the fastest layouts of {gpus} GPUs", HEADINGS, rows, right=range(3))


def search_json(found: Sequence[FoundLayout], gpus: int) -> dict[str, Any]:
    """Return what `braid simulate --search --json` prints."""
    return {
        "layouts": [
            {
                "overrides": each.overrides,
                "duration": each.seconds,
                "gpu_hours": each.seconds * gpus / HOUR,
                "filled": each.filled,
            }
            for each in found
        ]
    }
