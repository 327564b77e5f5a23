"""The state of every stage, derived from the ledger, the manifests and the checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from parallel.files import Checkpoint
from pipeline.graph import Stage
from pipeline.ledger import Event, Ledger, State, latest
from pipeline.lineage import Lineage, changes, lineage_from, read_manifest
from pipeline.run_directory import RunDirectory, StageDirectory, ended_early

if TYPE_CHECKING:  # building the settings classes takes longer than all of `braid status`
    from stages.settings import RunSettings


@dataclass(frozen=True)
class StageState:
    """Where a stage stands. `step` is that of its newest whole checkpoint."""

    state: State
    cause: str = ""
    attempts: int = 0
    step: int | None = None


def derive(
    run: RunDirectory, settings: RunSettings, stages: Sequence[Stage]
) -> dict[str, StageState]:
    """Every stage's state, in the order of the graph."""
    return states_of(run, stages, settings.layout.model_dump(), Ledger(run.ledger).events())


def states_of(
    run: RunDirectory, stages: Sequence[Stage], layout: dict[str, Any], events: Iterable[Event]
) -> dict[str, StageState]:
    """The same from the run's `events`, and without its settings. Every file is read once."""
    newest, running = latest(events), run.is_running()
    states: dict[str, StageState] = {}
    checkpoints: dict[str, Checkpoint | None] = {}
    for stage in stages:  # inputs come first
        directory = run.stage(stage.name)
        checkpoints[stage.name] = directory.newest_checkpoint()
        now = partial(lineage_from, stage, checkpoints, layout)
        left = _Left(directory, checkpoints[stage.name], directory.attempts())
        states[stage.name] = _state(stage, left, newest.get(stage.name), running, now, states)
    return states


@dataclass(frozen=True)
class _Left:
    """What attempts at a stage left behind."""

    directory: StageDirectory
    checkpoint: Checkpoint | None
    attempts: int

    def stands(self, state: State, cause: str = "") -> StageState:
        step = self.checkpoint.step if self.checkpoint else None
        return StageState(state, cause, self.attempts, step)


def _state(
    stage: Stage,
    left: _Left,
    event: Event | None,
    running: bool,
    now: Callable[[], Lineage],
    earlier: Mapping[str, StageState],
) -> StageState:
    if event is None:
        return StageState("pending", attempts=left.attempts)
    recorded = read_manifest(left.directory)
    if recorded is None:
        if left.directory.manifest.exists() or left.checkpoint is not None:
            return left.stands("stale", "its manifest.json is gone or damaged")
        return StageState("pending", attempts=left.attempts)
    if event.state == "done" or _holds_work(stage, left):
        reasons = list(changes(recorded, now()))
        reasons += [
            f"its input {name} is {earlier[name].state}"
            for name in stage.inputs
            if earlier[name].state != "done"
        ]
        lack = _lack(stage, left.directory, left.checkpoint) if event.state == "done" else None
        if lack and left.checkpoint is None:
            reasons.append(lack)
        if reasons:
            return left.stands("stale", "; ".join(reasons))
        if lack:  # a damaged last checkpoint was removed, and an older one is still there
            return left.stands("pending", lack)
    if event.state == "running" and not running:
        return left.stands("failed", "its launcher was killed")
    return left.stands(event.state, event.cause)


def _holds_work(stage: Stage, left: _Left) -> bool:
    """Whether a next attempt would build on what an earlier one left."""
    if stage.kind == "evaluate":
        return left.directory.measured.exists()
    return left.checkpoint is not None


def lacks(stage: Stage, directory: StageDirectory) -> str | None:
    """What a finished stage should have left and did not, or None."""
    return _lack(stage, directory, directory.newest_checkpoint())


def _lack(stage: Stage, directory: StageDirectory, checkpoint: Checkpoint | None) -> str | None:
    if stage.kind == "evaluate":
        return None if directory.results.exists() else "its results.json is gone"
    if stage.kind == "export":
        return None if directory.exported.exists() else "its exported model is gone"
    if checkpoint is None:
        return "it has no checkpoint"
    if checkpoint.step != stage.steps and ended_early(checkpoint) is None:
        return f"its newest checkpoint is of step {checkpoint.step} of {stage.steps}"
    return None
