"""The time that a run still needs, by the pace of what it has done."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import median

from pipeline.run.directory import RunDirectory
from pipeline.run.graph import Stage
from pipeline.run.metrics import newest_lines
from pipeline.run.run import Run, StageState, has_stopped
from pipeline.text import clock

TAIL_BYTES = 1 << 14  # of a stage's metrics, some tens of steps


@dataclass(frozen=True)
class Estimate:
    """The time that a run still needs.

    `seconds` is each stage's, None where nothing measured tells; `kinds` are the kinds of those.
    `devices` counts the trainer's ranks and the devices of separate engines; `stopped` are the
    gates that block other stages.
    """

    seconds: Mapping[str, float | None]
    devices: int
    stopped: Sequence[str] = ()
    kinds: Sequence[str] = ()

    @property
    def total(self) -> float:
        """The sum over all stages with an estimate, in seconds."""
        return sum(left or 0.0 for left in self.seconds.values())

    @property
    def unknown(self) -> list[str]:
        """The stages without an estimate."""
        return [name for name, left in self.seconds.items() if left is None]


def estimate(
    run: Run,
    states: Mapping[str, StageState],
    took: Mapping[str, float],
    only: Collection[str] | None = None,
) -> Estimate:
    """Estimate the time that each stage still needs.

    A stage with steps: the pace of its own steps and the time before the first one, else the median
    of the other stages of its kind in this run. A stage without steps: the time that it, or others
    of its kind, `took` before. A stage blocked by a stopped gate, or not in `only`, needs none.
    """
    stages, engine = run.stages, run.settings.engine
    idle = blocked(stages, states)
    to_run = [
        stage
        for stage in stages
        if states[stage.name].state != "done"
        and stage.name not in idle
        and (only is None or stage.name in only)
    ]
    kinds = {stage.kind for stage in to_run}
    paces = {
        stage.name: pace
        for stage in stages
        if stage.kind in kinds and stage.steps and (pace := _pace(run, stage)) is not None
    }
    usual_took, usual_starts, usual_paces = (
        _with_usual(measured, stages) for measured in (took, _starts(states, took, paces), paces)
    )
    seconds: dict[str, float | None] = dict.fromkeys((stage.name for stage in stages), 0.0)
    for stage in to_run:
        state = states[stage.name]
        if not stage.steps:
            seconds[stage.name] = usual_took[stage.name]
            continue
        saved = 0 if state.state == "stale" else state.step or 0
        start = 0.0 if state.state == "running" else usual_starts[stage.name] or 0.0
        pace = usual_paces[stage.name]
        seconds[stage.name] = None if pace is None else start + pace * (stage.steps - saved)
    engine_devices = engine.count * engine.ranks if engine.placement == "own" else 0
    stopped = [name for name, gates in idle.items() if name in gates]
    unknown = [stage.kind for stage in stages if seconds[stage.name] is None]
    devices = run.settings.layout.ranks + engine_devices
    return Estimate(seconds, devices, stopped, list(dict.fromkeys(unknown)))


def _starts(
    states: Mapping[str, StageState], took: Mapping[str, float], paces: Mapping[str, float]
) -> dict[str, float]:
    """Return the seconds outside the steps of each stage that one attempt finished."""
    starts: dict[str, float] = {}
    for name, pace in paces.items():
        state = states[name]
        # For a stage of several attempts, `took` has the last one only.
        whole = state.state == "done" and state.attempts == 1
        if whole and name in took and state.step is not None:
            starts[name] = max(0.0, took[name] - pace * state.step)
    return starts


def _with_usual(measured: Mapping[str, float], stages: Sequence[Stage]) -> dict[str, float | None]:
    """Return every stage's own value, or else the median of its kind's; None without any."""
    of_kind: dict[str, list[float]] = {}
    for stage in stages:
        if stage.name in measured:
            of_kind.setdefault(stage.kind, []).append(measured[stage.name])
    usual = {kind: median(values) for kind, values in of_kind.items()}
    return {stage.name: measured.get(stage.name, usual.get(stage.kind)) for stage in stages}


def _pace(run: RunDirectory, stage: Stage) -> float | None:
    """Return the median seconds of the newest steps: a resumed stage paused between two of them."""
    lines = newest_lines(run.stage(stage.name).metrics, TAIL_BYTES)
    gaps = [
        (after["time"] - before["time"]) / (after["step"] - before["step"])
        for before, after in pairwise(lines)
        if after["step"] > before["step"] and after["time"] > before["time"]
    ]
    return median(gaps) if gaps else None


def blocked(
    stages: Sequence[Stage], states: Mapping[str, StageState]
) -> dict[str, tuple[str, ...]]:
    """Return the stages that cannot start, each with the stopped gates upstream of it.

    A stopped gate blocks itself.
    """
    blocking: dict[str, tuple[str, ...]] = {}
    for stage in stages:  # dependencies come first
        state = states[stage.name]
        if has_stopped(state):
            blocking[stage.name] = (stage.name,)
        elif state.state in ("pending", "failed"):
            gates = chain.from_iterable(blocking.get(name, ()) for name in stage.waits_for)
            if names := tuple(dict.fromkeys(gates)):
                blocking[stage.name] = names
    return blocking


def left_line(left: Estimate) -> str:
    """Return the sum of an estimate, in a line."""
    if not left.total:
        if left.unknown:
            kinds = ", ".join(left.kinds)
            return f"time left unknown: no stage of kind {kinds} has finished yet"
        gates = ", ".join(left.stopped)
        return f"nothing more can start: stopped by {gates}" if gates else "nothing left to run"
    total = "less than 1 s" if left.total < 1 else f"about {clock(left.total)}"
    hours = left.total * left.devices / 3600
    spent = f"{hours:.2f}" if hours < 10 else f"{hours:,.0f}"
    line = f"{total} left, {'less than 0.01' if hours < 0.01 else spent} rank-hours"
    if not left.unknown:
        return line
    kind = "its kind" if len(left.unknown) == 1 else "their kinds"
    return f"{line}; not counted: {', '.join(left.unknown)}, since no stage of {kind} has finished"
