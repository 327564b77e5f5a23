"""A stage's training in the report: its curves, its guards, and what interrupted it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from parallel.families import family_violations
from parallel.layout_rules import layout_violations
from pipeline.estimate.stage_memory import fullest, stage_memory
from pipeline.report.page.recorded import short_number
from pipeline.report.view.symptoms import guards_of, steps_beyond
from pipeline.run.graph import Stage
from pipeline.run.metrics import LABELS, NOT_METRICS, Line
from pipeline.run.run import Run

MOST_POINTS = 4000  # of a curve; more are thinned out
DIGITS = 6  # of a number in a curve
SHOWN = ("running", "failed", "stale", "done")  # states of a history

Json = dict[str, Any]


def curves(lines: Sequence[Line]) -> Json:
    """Return the columns of a stage's metrics: `step`, and a list of each metric, null for none.

    An evaluation's lines are of several models and domains: its labels are columns too.
    """
    every = max(1, math.ceil(len(lines) / MOST_POINTS))
    thinned = list(lines[::every])
    if (len(lines) - 1) % every:
        thinned.append(lines[-1])  # the newest counts most
    names = {name: None for line in thinned for name in line if name not in NOT_METRICS}
    columns: Json = {"step": [line["step"] for line in thinned], "every": every}
    columns["metrics"] = {
        name: [short_number(line.get(name), DIGITS) for line in thinned] for name in names
    }
    for label in LABELS:
        if any(label in line for line in thinned):
            columns[label] = [line.get(label) for line in thinned]
    return columns


def guards(run: Run, stage: Stage, lines: Sequence[Line]) -> list[Json]:
    """Return the guards of a stage, each with its threshold and the steps at which it fired."""
    return [
        {
            **{"name": name, "metric": guard.metric, "side": guard.side},
            **{"threshold": guard.threshold, "action": guard.action, "remedy": guard.remedy},
            "fired": [
                line["step"]
                for line, times in steps_beyond(guard, lines)
                if times == guard.patience
            ],
        }
        for name, guard in guards_of(run, stage).items()
    ]


def history(run: Run, stage: str, lines: Sequence[Line]) -> Iterator[Json]:
    """Yield when a stage was started, continued, stopped or done, with the cause and the step."""
    for event in run.events:
        if event.stage == stage and event.state in SHOWN:
            before = [line["step"] for line in lines if line["time"] <= event.timestamp]
            yield {
                **{"time": event.time, "state": event.state, "attempt": event.attempt},
                **{"cause": event.cause, "step": max(before, default=0)},
            }


def planned_memory(run: Run, stage: Stage) -> int | None:
    """Return the bytes that `braid plan --memory` says of a stage's fullest rank.

    None for a run of an older version with a layout that this one would not start.
    """
    model, layout = run.settings.model, run.settings.layout
    if layout_violations(model, layout) or any(family_violations(model, layout)):
        return None
    return fullest(stage_memory(stage, run.settings)).total
