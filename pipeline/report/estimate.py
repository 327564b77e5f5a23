"""The next action of every stage of a run, and the time that it still needs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import median

from pipeline.run.directory import RunDirectory
from pipeline.run.graph import Stage
from pipeline.run.metrics import newest_lines
from pipeline.run.run import STOPPED_MARK, Run, StageState

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
    wanted: Collection[str] | None = None,
) -> Estimate:
    """Estimate the time that each stage still needs.

    A stage with steps: the pace of its own steps and the time before the first one, else the median
    of the other stages of its kind in this run. A stage without steps: the time that it, or others
    of its kind, `took` before. A stage blocked by a stopped gate, or not `wanted`, needs none.
    """
    stages, settings = run.stages, run.settings
    idle = blocked(stages, states)
    names = {stage.name for stage in stages if states[stage.name].state != "done"} - idle.keys()
    if wanted is not None:
        names &= set(wanted)
    to_run = [stage for stage in stages if stage.name in names]
    of_kind = {
        kind: [stage for stage in stages if stage.kind == kind]
        for kind in {stage.kind for stage in to_run}
    }
    measured = [stage for alike in of_kind.values() for stage in alike]
    paces = {stage.name: _pace(run, stage) for stage in measured if stage.steps}
    starts = _starts(measured, states, took, paces)
    engine = settings.engine
    own = engine.count * engine.tensor if engine.placement == "own" else 0
    seconds: dict[str, float | None] = dict.fromkeys((stage.name for stage in stages), 0.0)
    for stage in to_run:
        state = states[stage.name]
        alike = [each.name for each in of_kind[stage.kind]]
        if stage.steps:
            saved = 0 if state.state == "stale" else state.step or 0
            pace = _known(paces, stage.name, alike)
            start = 0.0 if state.state == "running" else _known(starts, stage.name, alike) or 0.0
            seconds[stage.name] = None if pace is None else start + pace * (stage.steps - saved)
        else:
            seconds[stage.name] = _known(took, stage.name, alike)
    stopped = [name for name, gates in idle.items() if name in gates]
    unknown = [stage.kind for stage in stages if seconds[stage.name] is None]
    kinds = list(dict.fromkeys(unknown))
    return Estimate(seconds, settings.layout.ranks + own, stopped, kinds)


def _starts(
    stages: Sequence[Stage],
    states: Mapping[str, StageState],
    took: Mapping[str, float],
    paces: Mapping[str, float | None],
) -> dict[str, float]:
    """Return the seconds outside its steps of each stage that finished in one attempt.

    For a stage of several attempts, `took` has the last one only.
    """
    found = {}
    for stage in stages:
        state, pace = states[stage.name], paces.get(stage.name)
        whole = state.state == "done" and state.attempts == 1
        if whole and stage.name in took and pace is not None and state.step is not None:
            found[stage.name] = max(0.0, took[stage.name] - pace * state.step)
    return found


def _known(found: Mapping[str, float | None], name: str, alike: Sequence[str]) -> float | None:
    if (own := found.get(name)) is not None:
        return own
    others = [each for other in alike if (each := found.get(other)) is not None]
    return median(others) if others else None


def _pace(run: RunDirectory, stage: Stage) -> float | None:
    """Return the median seconds of the newest steps: a resumed stage paused between two of them."""
    lines = newest_lines(run.stage(stage.name).metrics, TAIL_BYTES)
    gaps = [
        (after["time"] - before["time"]) / (after["step"] - before["step"])
        for before, after in pairwise(lines)
        if after["step"] > before["step"] and after["time"] > before["time"]
    ]
    return median(gaps) if gaps else None


def next_action(stages: Sequence[Stage], states: Mapping[str, StageState]) -> dict[str, str]:
    """Return in words what happens to each stage when the run continues."""
    gates = blocked(stages, states)
    return {
        stage.name: _action_of(stage, states[stage.name], gates.get(stage.name, ()))
        for stage in stages
    }


def blocked(
    stages: Sequence[Stage], states: Mapping[str, StageState]
) -> dict[str, tuple[str, ...]]:
    """Return the stages that cannot start, each with the stopped gates upstream of it.

    A stopped gate blocks itself.
    """
    found: dict[str, tuple[str, ...]] = {}
    for stage in stages:  # dependencies come first
        state = states[stage.name]
        if _has_stopped(state):
            found[stage.name] = (stage.name,)
        elif state.state in ("pending", "failed"):
            gates = chain.from_iterable(found.get(name, ()) for name in stage.waits_for)
            if names := tuple(dict.fromkeys(gates)):
                found[stage.name] = names
    return found


def _has_stopped(state: StageState) -> bool:
    return state.state == "failed" and state.cause.startswith(STOPPED_MARK)


def _action_of(stage: Stage, state: StageState, gates: Sequence[str]) -> str:
    if state.state == "done":
        return "is kept"
    if state.state == "stale":
        return f"is refused: {state.cause}"
    if state.state in ("running", "submitted"):
        return state.cause
    if _has_stopped(state):
        return "stops again, unless it is overridden or something changes"
    if gates:
        return f"waits for {', '.join(gates)}"
    if stage.steps and state.step:
        return f"continues from step {state.step}"
    return f"starts, after {', '.join(stage.after)}" if stage.after else "starts"
