"""The phase that every process of a running stage is in, and whom it waits for."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.run.graph import Stage
from pipeline.run.run import Run, StageState
from pipeline.run.timeline import Phase, engine_phases, innermost, rank_phases
from pipeline.tables import Cell, table
from pipeline.text import clock

BETWEEN, IDLE = ("between two phases", None), ("idle", "requests")  # outside all phases
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
            ranks = rank_phases(run, stage)
            found += [_now(stage, name, own, now, BETWEEN) for name, own in ranks.items()]
            engines = engine_phases(run, stage) if stage.needs_engine else {}
            found += [_now(stage, name, own, now, IDLE) for name, own in engines.items()]
    return found


def _now(
    stage: Stage, process: str, own: list[Phase], now: float, outside: tuple[str, str | None]
) -> dict[str, Any]:
    """Return what a process does; `outside` all phases, that and whom it waits for."""
    if (present := innermost(own)) is None:
        name, waits_for = outside
        since = max((each.end for each in own if each.end is not None), default=now)
    else:
        name, waits_for, since = present.name, present.waits_for, present.begin
        steps = [each.step for each in own if each.end is None and each.step is not None]
        if steps:
            name = (
                f"step {steps[-1]}" if present.step is not None else f"{name} of step {steps[-1]}"
            )
    about = {"stage": stage.name, "process": process, "phase": name, "waits_for": waits_for}
    return {**about, "seconds": max(0.0, now - since)}


def waits_cells(found: Sequence[Mapping[str, Any]]) -> list[list[str | Cell]]:
    """Return the cells of each process, under HEADINGS."""
    return [
        [
            *(each["stage"], each["process"], each["phase"], each["waits_for"] or ""),
            clock(each["seconds"]),
        ]
        for each in found
    ]


def waits_table(found: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of `waits`, or the line that nothing runs."""
    return table("", HEADINGS, waits_cells(found)) if found else "no stage is running"
