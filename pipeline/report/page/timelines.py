"""The timelines of a run's processes, as its report has them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from parallel.errors import UserError
from pipeline.run.graph import Stage
from pipeline.run.run import Run
from pipeline.run.timeline import Phase, engine_phases, rank_phases

Json = dict[str, Any]

MOST_PHASES = 4000  # of a process that are drawn, the newest
MOST_RANKS, MOST_ENGINES = 48, 16  # of a stage
DIGITS = 3  # of a second


def timelines(run: Run, damaged: list[str]) -> dict[str, Json]:
    """Return, of every stage whose ranks recorded phases, the phases of its ranks and engines.

    Of each process its sums by phase too, without the phases inside: those add up to its time. Why
    a stage's cannot be read is added to `damaged`.
    """
    found = {}
    for stage in run.stages:
        try:
            found[stage.name] = _of_stage(run, stage)
        except UserError as error:
            damaged.append(str(error))
    return {name: phases for name, phases in found.items() if phases}


def _of_stage(run: Run, stage: Stage) -> Json:
    ranks = {name: own for name, own in rank_phases(run, stage).items() if own}
    if not ranks:
        return {}
    since = min(each.begin for own in ranks.values() for each in own)
    until = max(_end(each) for own in ranks.values() for each in own)
    engines = engine_phases(run, stage) if stage.needs_engine else {}
    within = {
        name: [
            replace(each, begin=max(each.begin, since), end=min(_end(each), until))
            for each in own
            if each.begin < until and _end(each) > since
        ]
        for name, own in engines.items()
    }
    processes = [*ranks.items()][:MOST_RANKS] + [*within.items()][:MOST_ENGINES]
    return {name: _of_process(own, since, until) for name, own in processes}


def _of_process(own: Sequence[Phase], since: float, until: float) -> Json:
    phases = sorted(own, key=lambda each: each.begin)
    return {
        "since": round(since, DIGITS),
        "until": round(until, DIGITS),
        "seconds": own_seconds(phases),
        "waits": _waits(phases),
        "phases": [
            [
                each.name,
                round(each.begin, DIGITS),
                round(_end(each), DIGITS),
                each.waits_for,
                each.step,
            ]
            for each in phases[-MOST_PHASES:]
        ],
    }


def own_seconds(phases: Sequence[Phase]) -> dict[str, float]:
    """Return the seconds of every phase without those of the phases inside it.

    `phases` are by their beginnings; one that begins in another is inside it.
    """
    seconds: dict[str, float] = defaultdict(float)
    around: list[Phase] = []
    for each in phases:
        while around and _end(around[-1]) <= each.begin:
            around.pop()
        if around:
            seconds[around[-1].name] -= min(_end(each), _end(around[-1])) - each.begin
        seconds[each.name] += _end(each) - each.begin
        around.append(each)
    return {name: round(value, DIGITS) for name, value in seconds.items()}


def _waits(phases: Sequence[Phase]) -> dict[str, float]:
    """Return the seconds that a process waits for each that it waits for."""
    seconds: dict[str, float] = defaultdict(float)
    for each in phases:
        if each.waits_for is not None:
            seconds[each.waits_for] += _end(each) - each.begin
    return {name: round(value, DIGITS) for name, value in seconds.items()}


def _end(phase: Phase) -> float:
    """Return the end of a phase; one that lasts, or whose process was lost, has no length."""
    return phase.begin if phase.end is None else phase.end
