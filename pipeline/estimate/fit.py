"""A layout for a run's GPUs, fast and with memory to spare, and what lets a large model fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from parallel.estimates.memory import reading_memory
from parallel.settings import LayoutSettings, ModelSettings
from pipeline.config.rules import violations
from pipeline.estimate.capacity import MOST_RANKS, Change, changed_settings, training_changes
from pipeline.estimate.layout_search import best_layouts, fullest_share
from pipeline.estimate.simulation import Assumptions
from pipeline.run.graph import Stage, compile_graph
from stages.settings import RunSettings

TRIED = 200  # of the fastest layouts
SLOWER = 1.1  # than the fastest, of a layout that is preferred for its memory
TRAINED = 3  # times the bytes of bf16 weights: with their gradients in fp32
ROOMY = 0.75  # of a GPU, with which the trainer has room enough
OF_NUMERICS = "optimizer.precision_aware"  # the change of training that no search makes


@dataclass(frozen=True)
class FittedRun:
    """A run's settings with a layout, and what had to change for it, by dotted key.

    `trained_share` is the share of a GPU that the trainer's fullest phase needs.
    """

    settings: RunSettings
    changes: Change
    seconds: float
    trained_share: float


def fitted(settings: RunSettings, gpus: int, assumed: Assumptions) -> FittedRun | None:
    """Return the run on this number of GPUs; None where no layout fits.

    Of the layouts within a tenth of the fastest it is the first whose trainer leaves a quarter of a
    GPU free, or else the one that leaves most: a simulation sees neither fragmentation nor an
    uneven batch. Where none fits, the optimizer's state moves to the host, a half and then all.
    """
    if not _holds(settings.model, gpus, assumed):
        return None
    stages = compile_graph(settings)
    trained = [stage for stage in stages if stage.steps]
    assumed = replace(assumed, per_node=min(assumed.per_node, gpus))
    for changes in _changes(stages, settings):
        changed = changed_settings(settings, changes)
        if layouts := best_layouts(stages, changed, gpus, assumed, TRIED):
            # A step may have too few problems for the data-parallel ranks of some.
            valid = [layout for layout in layouts if not any(violations(layout.settings))]
            layouts = valid or layouts
            near = [
                (fullest_share(trained, layout.settings, assumed, asleep=True), layout)
                for layout in layouts
                if layout.seconds <= SLOWER * layouts[0].seconds
            ]
            # Below ROOMY more room gains nothing, and the faster layout is taken.
            share, best = min(near, key=lambda pair: (max(pair[0], ROOMY), pair[1].seconds))
            return FittedRun(best.settings, changes, best.seconds, share)
    return None


def gpus_that_fit(settings: RunSettings, gpus: int, assumed: Assumptions) -> int | None:
    """Return the first doubling of the GPUs that has a layout; None where MOST_RANKS has none.

    More than a node has are made a multiple of them.
    """
    stages = compile_graph(settings)
    *_, most = _changes(stages, settings)
    smallest = changed_settings(settings, most)
    while (gpus := _whole_nodes(gpus * 2, assumed.per_node)) <= MOST_RANKS:
        held = _holds(settings.model, gpus, assumed)
        if held and best_layouts(stages, smallest, gpus, assumed, 1):
            return gpus
    return None


def _whole_nodes(gpus: int, per_node: int) -> int:
    return gpus if gpus <= per_node else math.ceil(gpus / per_node) * per_node


def _holds(model: ModelSettings, gpus: int, assumed: Assumptions) -> bool:
    """Return false where weights and gradients alone are more than all GPUs, without a search."""
    [rank] = reading_memory(model.model_copy(update={"precision": "bf16"}), LayoutSettings())
    sheets = (assumed.gpu, *assumed.kinds.values())
    return TRAINED * rank.parameters < gpus * max(sheet.memory_bytes for sheet in sheets)


def _changes(stages: Sequence[Stage], settings: RunSettings) -> Iterator[Change]:
    """Yield no change, then each further one of training with those before it."""
    changes: Change = {}
    yield changes
    for change in training_changes(stages, settings, ()):
        if not any(key.endswith(OF_NUMERICS) for key in change):
            changes = {**changes, **change}
            yield changes
