"""The state of every stage, derived from the ledger, the manifests and the checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from parallel.files import Checkpoint
from pipeline.config.violations import shown
from pipeline.run.directory import RunDirectory, StageDirectory, ended_early
from pipeline.run.graph import Stage
from pipeline.run.ledger import Event, Ledger, State, latest
from pipeline.run.lineage import Lineage, changes, lineage_from, read_manifest
from pipeline.run.verdicts import OVERRIDDEN, DamagedVerdict, read_verdict

if TYPE_CHECKING:  # building the settings classes takes longer than all of `braid status`
    from pipeline.slurm.queue import QueuedJob
    from stages.settings import RunSettings


@dataclass(frozen=True)
class StageState:
    """Where a stage stands. `step` is that of its newest whole checkpoint, and `job` the number of
    the job that Slurm has for it."""

    state: State
    cause: str = ""
    attempts: int = 0
    step: int | None = None
    job: str | None = None


def derive(
    run: RunDirectory,
    settings: RunSettings,
    stages: Sequence[Stage],
    queue: Mapping[str, QueuedJob] | None = None,
) -> dict[str, StageState]:
    """Every stage's state, in the order of the graph. `queue` has the jobs that the ledger names
    and Slurm still has; without it, what was submitted is taken to wait."""
    events = Ledger(run.ledger).events()
    return states_of(run, stages, settings.layout.model_dump(), events, queue)


def states_of(
    run: RunDirectory,
    stages: Sequence[Stage],
    layout: dict[str, Any],
    events: Iterable[Event],
    queue: Mapping[str, QueuedJob] | None = None,
) -> dict[str, StageState]:
    """The same from the run's `events`, and without its settings. Every file is read once."""
    newest = latest(events)
    states: dict[str, StageState] = {}
    checkpoints: dict[str, Checkpoint | None] = {}
    jobs = {job.stage: job for job in (queue or {}).values()}  # by their own arguments
    for stage in stages:  # inputs come first
        directory = run.stage(stage.name)
        checkpoints[stage.name] = directory.newest_checkpoint()
        now = partial(lineage_from, stage, checkpoints, layout)
        left = _Left(directory, checkpoints[stage.name], directory.attempts())
        event = newest.get(stage.name)
        found = _state(stage, left, event, now, states)
        if found.state not in ("done", "stale"):  # which no job changes
            found = _in_the_queue(run, left, event, queue, jobs.get(stage.name)) or found
        states[stage.name] = found
    return states


@dataclass(frozen=True)
class _Left:
    """What attempts at a stage left behind."""

    directory: StageDirectory
    checkpoint: Checkpoint | None
    attempts: int

    def stands(self, state: State, cause: str = "", job: str | None = None) -> StageState:
        step = self.checkpoint.step if self.checkpoint else None
        return StageState(state, cause, self.attempts, step, job)


def _in_the_queue(
    run: RunDirectory,
    left: _Left,
    event: Event | None,
    queue: Mapping[str, QueuedJob] | None,
    unnamed: QueuedJob | None,
) -> StageState | None:
    """The state of a stage that Slurm has, or had and lost; None of others. `unnamed` is a job for
    it that the ledger need not name."""
    number = event.job if event is not None and event.state != "done" else None
    job = (queue or {}).get(number) if number is not None else None
    if (job := job or unnamed) is not None:
        return left.stands("submitted" if job.waits else "running", job.describe(), job.number)
    if event is None or event.job is None or event.state == "done":
        return None
    if event.state != "submitted":
        return None
    if queue is None:
        return left.stands("submitted", event.cause, event.job)
    cause = f"job {event.job} left the queue before it began"
    if output := run.output_of(event.job):
        cause = f"job {event.job} ended before the stage began: {shown(output)} says why"
    return left.stands("failed", cause, event.job)


def _state(
    stage: Stage,
    left: _Left,
    event: Event | None,
    now: Callable[[], Lineage],
    earlier: Mapping[str, StageState],
) -> StageState:
    holds_work = _holds_work(stage, left)
    if event is None and not holds_work:
        return StageState("pending", attempts=left.attempts)
    done = event is not None and event.state == "done"
    recorded = read_manifest(left.directory)
    if recorded is None:
        if left.directory.manifest.exists() or left.checkpoint is not None:
            return left.stands("stale", "its manifest.json is gone or damaged")
        # It may have failed before its first attempt.
        cause = event.cause if event is not None and event.state == "failed" else ""
        return StageState("pending", cause, left.attempts)
    if done or holds_work:
        reasons = list(changes(recorded, now()))
        reasons += [
            f"its input {name} is {earlier[name].state}"
            for name in stage.inputs
            if earlier[name].state != "done" and event is not None
        ]
        lack = _lack(stage, left.directory, left.checkpoint) if done else None
        if lack and left.checkpoint is None:
            reasons.append(lack)
        if reasons:
            return left.stands("stale", "; ".join(reasons))
        if lack:  # a damaged last checkpoint was removed, and an older one is still there
            return left.stands("pending", lack)
    if event is None:
        return left.stands("pending", "the ledger has no line of it, and its work is there")
    if stage.kind == "gate" and (damage := damaged_verdict(left.directory, event)):
        return left.stands("pending", damage)
    if event.state == "running" and not left.directory.is_running():
        return left.stands("failed", "its launcher was killed")
    return left.stands(event.state, event.cause)


def damaged_verdict(directory: StageDirectory, event: Event) -> str | None:
    """What is wrong with the verdict of a gate that has said something; None where nothing is, and
    where a person has overridden it."""
    if event.state not in ("done", "failed") or OVERRIDDEN in event.cause:
        return None
    try:
        read_verdict(directory)
    except DamagedVerdict as error:
        return f"{error}; the gate is asked again"
    return None


def _holds_work(stage: Stage, left: _Left) -> bool:
    """Whether a next attempt would build on what an earlier one left."""
    if stage.measures:
        return left.directory.measured.exists()
    return left.checkpoint is not None


def lacks(stage: Stage, directory: StageDirectory) -> str | None:
    """What a finished stage should have left and did not, or None."""
    return _lack(stage, directory, directory.newest_checkpoint())


def _lack(stage: Stage, directory: StageDirectory, checkpoint: Checkpoint | None) -> str | None:
    if stage.measures:
        return None if directory.results.exists() else "its results.json is gone"
    if stage.kind == "export":
        return None if directory.exported.exists() else "its exported model is gone"
    if checkpoint is None:
        return "it has no checkpoint"
    if checkpoint.step != stage.steps and ended_early(checkpoint) is None:
        return f"its newest checkpoint is of step {checkpoint.step} of {stage.steps}"
    return None
