"""The state of every stage, derived from the ledger, the manifests and the checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.graph import Stage
from pipeline.ledger import Event, Ledger, State, latest
from pipeline.lineage import changes, lineage_now, read_manifest
from pipeline.run_directory import RunDirectory, StageDirectory
from pipeline.slurm.queue import QueuedJob
from stages.settings import RunSettings


@dataclass(frozen=True)
class StageState:
    """Where a stage stands. `step` is that of its newest whole checkpoint."""

    state: State
    cause: str = ""
    attempts: int = 0
    step: int | None = None
    job: str | None = None


def derive(
    run: RunDirectory,
    settings: RunSettings,
    stages: tuple[Stage, ...],
    queue: Mapping[str, QueuedJob] | None = None,
) -> dict[str, StageState]:
    """Every stage's state, in the order of the graph. `queue` has the jobs that the ledger names
    and Slurm still has; without it, what was submitted is taken to wait."""
    events = latest(Ledger(run.ledger).events())
    states: dict[str, StageState] = {}
    for stage in stages:
        states[stage.name] = _state(run, settings, stage, events.get(stage.name), states, queue)
    return states


def _state(
    run: RunDirectory,
    settings: RunSettings,
    stage: Stage,
    event: Event | None,
    earlier: dict[str, StageState],
    queue: Mapping[str, QueuedJob] | None,
) -> StageState:
    directory = run.stage(stage.name)
    if event is not None and event.job is not None and event.state != "done":
        if (job := (queue or {}).get(event.job)) is not None:
            return _in_the_queue(job, directory, event)
        if event.state == "submitted":
            state: State = "submitted" if queue is None else "failed"
            lost = f"job {event.job} left the queue before it began"
            cause = event.cause if queue is None else lost
            return StageState(state, cause, directory.attempts(), _step(directory), event.job)
    recorded = read_manifest(directory)
    if recorded is None or event is None:
        return StageState("pending", attempts=directory.attempts())
    checkpoint = directory.newest_checkpoint()
    attempts, step = directory.attempts(), checkpoint.step if checkpoint else None
    if event.state == "done" or _holds_work(stage, directory):
        reasons = list(changes(recorded, lineage_now(stage, settings, run)))
        reasons += [
            f"its input {name} is {earlier[name].state}"
            for name in stage.inputs
            if earlier[name].state != "done"
        ]
        lack = lacks(stage, directory) if event.state == "done" else None
        if lack and step is None:
            reasons.append(lack)
        if reasons:
            return StageState("stale", "; ".join(reasons), attempts, step)
        if lack:  # a damaged last checkpoint was removed, and an older one is still there
            return StageState("pending", lack, attempts, step)
    if event.state == "running" and not run.stage_is_running(stage.name):
        return StageState("failed", "its launcher was killed", attempts, step)
    return StageState(event.state, event.cause, attempts, step)


def _in_the_queue(job: QueuedJob, directory: StageDirectory, event: Event) -> StageState:
    state: State = "submitted" if job.waits else "running"
    return StageState(state, job.describe(), directory.attempts(), _step(directory), event.job)


def _step(directory: StageDirectory) -> int | None:
    checkpoint = directory.newest_checkpoint()
    return checkpoint.step if checkpoint else None


def _holds_work(stage: Stage, directory: StageDirectory) -> bool:
    """Whether a next attempt would build on what an earlier one left."""
    if stage.measures:
        return directory.measured.exists()
    return directory.newest_checkpoint() is not None


def lacks(stage: Stage, directory: StageDirectory) -> str | None:
    """What a finished stage should have left and did not, or None."""
    if stage.measures:
        return None if directory.results.exists() else "its results.json is gone"
    if stage.kind == "export":
        return None if directory.exported.exists() else "its exported model is gone"
    checkpoint = directory.newest_checkpoint()
    if checkpoint is None:
        return "it has no checkpoint"
    if checkpoint.step != stage.steps and directory.ended_early() is None:
        return f"its newest checkpoint is of step {checkpoint.step} of {stage.steps}"
    return None
