"""How long the stages of a run still take, from what those before them have taken."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from pipeline.report.outlook import held
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import Stage
from pipeline.run.metrics import newest_lines
from pipeline.run.run import Run
from pipeline.run.states import StageState

TAIL_BYTES = 1 << 14  # of a stage's metrics: some tens of steps


@dataclass(frozen=True)
class Estimate:
    """The seconds that each stage still takes; None where nothing is known that it could be told
    by. `devices` are the ranks of the trainer, and engines of their own; `stopped` are the gates
    that keep others from starting, and `kinds` those of which no stage has been measured."""

    seconds: Mapping[str, float | None]
    devices: int
    stopped: Sequence[str] = ()
    kinds: Sequence[str] = ()

    @property
    def total(self) -> float:
        """Of all stages of which something is known, one after another."""
        return sum(left or 0.0 for left in self.seconds.values())

    @property
    def unknown(self) -> list[str]:
        """Those of which nothing is."""
        return [name for name, left in self.seconds.items() if left is None]


def estimate(
    run: Run,
    states: Mapping[str, StageState],
    took: Mapping[str, float],
    wanted: Collection[str] | None = None,
) -> Estimate:
    """From the pace of a stage's own steps and the time before the first of them, or else of the
    other stages of its kind in this run; a stage without steps takes as many seconds as it, or
    others of its kind, `took` before. What a gate that has stopped keeps from starting takes none,
    nor does what is not `wanted`."""
    stages, settings = run.stages, run.settings
    idle = held(stages, states)
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
            begun = 0 if state.state == "stale" else state.step or 0
            pace = _known(paces, stage.name, alike)
            start = 0.0 if state.state == "running" else _known(starts, stage.name, alike) or 0.0
            seconds[stage.name] = None if pace is None else start + pace * (stage.steps - begun)
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
    """The seconds besides its steps of each stage that took one attempt from its start to its end:
    of another, what `took` counts is only its last attempt."""
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
    """Seconds a step, the median of the last ones; a resumed stage stood still between two."""
    lines = newest_lines(run.stage(stage.name).metrics, TAIL_BYTES)
    gaps = [
        (after["time"] - before["time"]) / (after["step"] - before["step"])
        for before, after in pairwise(lines)
        if after["step"] > before["step"] and after["time"] > before["time"]
    ]
    return median(gaps) if gaps else None
