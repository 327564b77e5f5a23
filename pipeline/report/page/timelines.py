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
    by_stage = {}
    for stage in run.stages:
        try:
            by_stage[stage.name] = _of_stage(run, stage)
        except UserError as error:
            damaged.append(str(error))
    return {name: phases for name, phases in by_stage.items() if phases}


def _of_stage(run: Run, stage: Stage) -> Json:
    ranks = {name: phases for name, phases in rank_phases(run, stage).items() if phases}
    if not ranks:
        return {}
    since = min(phase.begin for phases in ranks.values() for phase in phases)
    until = max(_end(phase) for phases in ranks.values() for phase in phases)
    engines = engine_phases(run, stage) if stage.needs_engine else {}
    # Engines start before the ranks and end after them; shares are of the ranks' time.
    within = {
        name: [
            replace(phase, begin=max(phase.begin, since), end=min(_end(phase), until))
            for phase in phases
            if phase.begin < until and _end(phase) > since
        ]
        for name, phases in engines.items()
    }
    processes = [*ranks.items()][:MOST_RANKS] + [*within.items()][:MOST_ENGINES]
    return {name: _of_process(phases, since, until) for name, phases in processes}


def _of_process(phases: Sequence[Phase], since: float, until: float) -> Json:
    by_begin = sorted(phases, key=lambda phase: phase.begin)
    return {
        "since": round(since, DIGITS),
        "until": round(until, DIGITS),
        "seconds": own_seconds(by_begin),
        "waits": _waits(by_begin),
        "phases": [
            [
                phase.name,
                round(phase.begin, DIGITS),
                round(_end(phase), DIGITS),
                phase.waits_for,
                phase.step,
            ]
            for phase in by_begin[-MOST_PHASES:]
        ],
    }


def own_seconds(phases: Sequence[Phase]) -> dict[str, float]:
    """Return the seconds of every phase without those of the phases inside it.

    `phases` are by their beginnings; one that begins in another is inside it.
    """
    seconds: dict[str, float] = defaultdict(float)
    around: list[Phase] = []
    for phase in phases:
        while around and _end(around[-1]) <= phase.begin:
            around.pop()
        if around:
            seconds[around[-1].name] -= min(_end(phase), _end(around[-1])) - phase.begin
        seconds[phase.name] += _end(phase) - phase.begin
        around.append(phase)
    return {name: round(value, DIGITS) for name, value in seconds.items()}


def _waits(phases: Sequence[Phase]) -> dict[str, float]:
    """Return the seconds that a process waits for each that it waits for."""
    seconds: dict[str, float] = defaultdict(float)
    for phase in phases:
        if phase.waits_for is not None:
            seconds[phase.waits_for] += _end(phase) - phase.begin
    return {name: round(value, DIGITS) for name, value in seconds.items()}


def _end(phase: Phase) -> float:
    """Return the end of a phase; one that lasts, or whose process was lost, has no length."""
    return phase.begin if phase.end is None else phase.end
