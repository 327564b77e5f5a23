"""The phase that every process of a running stage is in, and whom it waits for."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.report.tables import table
from pipeline.run.graph import Stage
from pipeline.run.run import Run, StageState
from pipeline.run.timeline import Phase, engine_phases, innermost, rank_phases
from pipeline.text import clock

HEADINGS = ("stage", "process", "phase", "waits for", "since")


def waits(
    run: Run, states: Mapping[str, StageState], now: float | None = None
) -> list[dict[str, Any]]:
    """Return what each process of the running stages does, as `braid look --waits --json` prints.

    `seconds` is how long, by the clock of this machine; an engine outside all phases is idle.
    """
    now = time.time() if now is None else now
    found = []
    for stage in run.stages:
        if states[stage.name].state == "running":
            found += [_rank(stage, name, own, now) for name, own in rank_phases(run, stage).items()]
            if stage.needs_engine:
                engines = engine_phases(run, stage)
                found += [_engine(stage, name, own, now) for name, own in engines.items()]
    return found


def _rank(stage: Stage, process: str, own: list[Phase], now: float) -> dict[str, Any]:
    present = innermost(own)
    if present is None:
        ended = [each.end for each in own if each.end is not None]
        return _row(stage, process, "between two phases", None, max(ended, default=now), now)
    steps = [each.step for each in own if each.end is None and each.step is not None]
    name = f"{present.name} of step {steps[-1]}" if steps else present.name
    if steps and present.step is not None:
        name = f"step {present.step}"
    return _row(stage, process, name, present.waits_for, present.begin, now)


def _engine(stage: Stage, process: str, own: list[Phase], now: float) -> dict[str, Any]:
    present = innermost(own)
    if present is None:
        ended = [each.end for each in own if each.end is not None]
        return _row(stage, process, "idle", "requests", max(ended, default=now), now)
    return _row(stage, process, present.name, present.waits_for, present.begin, now)


def _row(
    stage: Stage, process: str, phase: str, waits_for: str | None, since: float, now: float
) -> dict[str, Any]:
    return {
        **{"stage": stage.name, "process": process, "phase": phase, "waits_for": waits_for},
        "seconds": max(0.0, now - since),
    }


def waits_table(found: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of `waits`, or the line that nothing runs."""
    if not found:
        return "no stage is running"
    rows = [
        [
            *(each["stage"], each["process"], each["phase"], each["waits_for"] or ""),
            clock(each["seconds"]),
        ]
        for each in found
    ]
    return table("", HEADINGS, rows)
