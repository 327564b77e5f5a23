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
    processes = []
    for stage in run.stages:
        if states[stage.name].state == "running":
            ranks = rank_phases(run, stage)
            processes += [_now(stage, name, phases, now, BETWEEN) for name, phases in ranks.items()]
            engines = engine_phases(run, stage) if stage.needs_engine else {}
            processes += [_now(stage, name, phases, now, IDLE) for name, phases in engines.items()]
    return processes


def _now(
    stage: Stage, process: str, phases: list[Phase], now: float, outside: tuple[str, str | None]
) -> dict[str, Any]:
    """Return what a process does; `outside` all phases, that and whom it waits for."""
    if (present := innermost(phases)) is None:
        name, waits_for = outside
        since = max((phase.end for phase in phases if phase.end is not None), default=now)
    else:
        name, waits_for, since = present.name, present.waits_for, present.begin
        steps = [phase.step for phase in phases if phase.end is None and phase.step is not None]
        if steps:
            name = (
                f"step {steps[-1]}" if present.step is not None else f"{name} of step {steps[-1]}"
            )
    about = {"stage": stage.name, "process": process, "phase": name, "waits_for": waits_for}
    # The clock of a rank's node may be ahead of this machine's.
    return {**about, "seconds": max(0.0, now - since)}


def waits_cells(processes: Sequence[Mapping[str, Any]]) -> list[list[str | Cell]]:
    """Return the cells of each process, under HEADINGS."""
    return [
        [
            *(process["stage"], process["process"], process["phase"], process["waits_for"] or ""),
            clock(process["seconds"]),
        ]
        for process in processes
    ]


def waits_table(processes: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of `waits`."""
    return table("", HEADINGS, waits_cells(processes))
