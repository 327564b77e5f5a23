"""The state of every stage, derived from the ledger, the manifests and the checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from parallel.files import Checkpoint, read_text
from pipeline.config.violations import shown
from pipeline.errors import BraidError, reason
from pipeline.run.directory import RunDirectory, StageDirectory, ended_early
from pipeline.run.graph import Stage
from pipeline.run.ledger import Event, State, latest
from pipeline.run.lineage import Lineage, changes, lineage_from, read_manifest

WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
STOPPED_MARK = "gate: "  # starts the verdict of a gate that stopped
OVERRIDDEN = "overridden: "  # in the cause of a gate that a person has overridden

Outcome = Literal["passed", "warned", "stopped"]


@dataclass(frozen=True)
class QueuedJob:
    """A job in Slurm's queue, as squeue shows it; `stage` is None where its comment names none."""

    number: str
    state: str
    reason: str
    elapsed: str
    limit: str
    nodes: str
    stage: str | None = None

    @property
    def waits(self) -> bool:
        return self.state in WAITING

    def describe(self) -> str:
        """Return the job's state in a few words."""
        if self.waits:
            return f"job {self.number} waits: {self.reason}"
        return f"job {self.number} on {self.nodes}, {self.elapsed} of {self.limit}"


@dataclass(frozen=True)
class GateVerdict:
    """The verdict of a gate, with the measured numbers as its reasons."""

    outcome: Outcome
    reasons: tuple[str, ...]

    @property
    def text(self) -> str:
        """The verdict as the ledger has it."""
        mark = STOPPED_MARK if self.outcome == "stopped" else f"{self.outcome}: "
        return f"{mark}{'; '.join(self.reasons)}"


class DamagedVerdict(BraidError):
    """A verdict.json that no gate has written."""


@dataclass(frozen=True)
class StageState:
    """The state of a stage and its cause.

    `step` is the step of its newest whole checkpoint, `job` the number of its job in Slurm's queue.
    """

    state: State
    cause: str = ""
    attempts: int = 0
    step: int | None = None
    job: str | None = None


def derive(
    run: RunDirectory,
    stages: Sequence[Stage],
    layout: dict[str, Any],
    events: Iterable[Event],
    queue: Mapping[str, QueuedJob] | None = None,
) -> dict[str, StageState]:
    """Return every stage's state, in the order of the graph; each file is read once.

    `queue` has the jobs that Slurm still has; without it, a submitted stage counts as waiting.
    """
    newest = latest(events)
    states: dict[str, StageState] = {}
    checkpoints: dict[str, Checkpoint | None] = {}
    jobs = {job.stage: job for job in (queue or {}).values()}  # by the jobs' comments
    for stage in stages:  # inputs come first
        directory = run.stage(stage.name)
        checkpoints[stage.name] = directory.newest_checkpoint()
        now = partial(lineage_from, stage, checkpoints, layout)
        left = _Output(directory, checkpoints[stage.name], directory.attempts())
        event = newest.get(stage.name)
        found = _state(stage, left, event, now, states)
        if found.state not in ("done", "stale"):  # no job changes these two
            found = _queued_state(run, left, event, queue, jobs.get(stage.name)) or found
        states[stage.name] = found
    return states


def as_done(states: Mapping[str, StageState], *these: State) -> dict[str, StageState]:
    """Return the states with every one of `these` replaced by done."""
    return {
        name: StageState("done") if state.state in these else state
        for name, state in states.items()
    }


def missing_output(stage: Stage, directory: StageDirectory) -> str | None:
    """Return which output of a stage that should be done is missing; None if it is complete."""
    return _missing_output(stage, directory, directory.newest_checkpoint())


def read_verdict(directory: StageDirectory) -> GateVerdict | None:
    """Return the verdict of a gate; None for other stages and a gate without a verdict yet.

    Raises:
        DamagedVerdict: verdict.json is not an outcome with its reasons.
    """
    path = directory.verdict
    try:
        found = json.loads(read_text(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        why = reason(error) if isinstance(error, OSError) else f"not JSON ({error})"
        raise DamagedVerdict(f"{shown(path)}: damaged: {why}") from error
    outcome, reasons = None, None
    if isinstance(found, dict) and found.keys() == {"outcome", "reasons"}:
        outcome, reasons = found["outcome"], found["reasons"]
    texts = isinstance(reasons, list) and all(isinstance(each, str) for each in reasons)
    if outcome is None or outcome not in get_args(Outcome) or not texts or not reasons:
        raise DamagedVerdict(
            f"{shown(path)}: damaged: not an outcome ({', '.join(get_args(Outcome))}) with its "
            "reasons"
        )
    return GateVerdict(outcome, tuple(reasons))


def damaged_verdict(directory: StageDirectory, event: Event) -> str | None:
    """Return what is wrong with the verdict of a judged gate; None where it is sound or overridden.

    A damaged verdict makes the gate run again.
    """
    if event.state not in ("done", "failed") or OVERRIDDEN in event.cause:
        return None
    try:
        read_verdict(directory)
    except DamagedVerdict as error:
        return f"{error}; the gate runs again"
    return None


@dataclass(frozen=True)
class _Output:
    """The output that attempts at a stage left behind."""

    directory: StageDirectory
    checkpoint: Checkpoint | None
    attempts: int

    def stands(self, state: State, cause: str = "", job: str | None = None) -> StageState:
        step = self.checkpoint.step if self.checkpoint else None
        return StageState(state, cause, self.attempts, step, job)


def _queued_state(
    run: RunDirectory,
    left: _Output,
    event: Event | None,
    queue: Mapping[str, QueuedJob] | None,
    unnamed: QueuedJob | None,
) -> StageState | None:
    """Return the state of a stage that Slurm has, or had and lost; None for other stages.

    `unnamed` is a job of the stage that the ledger may not name.
    """
    number = event.job if event is not None and event.state != "done" else None
    job = (queue or {}).get(number) if number is not None else None
    if (job := job or unnamed) is not None:
        return left.stands("submitted" if job.waits else "running", job.describe(), job.number)
    if event is None or event.job is None or event.state != "submitted":
        return None
    if queue is None:
        return left.stands("submitted", event.cause, event.job)
    cause = f"job {event.job} left the queue before it started"
    if output := run.output_of(event.job):
        cause = f"job {event.job} ended before the stage started; see {shown(output)}"
    return left.stands("failed", cause, event.job)


def _state(
    stage: Stage,
    left: _Output,
    event: Event | None,
    now: Callable[[], Lineage],
    earlier: Mapping[str, StageState],
) -> StageState:
    holds_work = left.directory.measured.exists() if stage.measures else left.checkpoint is not None
    if event is None and not holds_work:
        return StageState("pending", attempts=left.attempts)
    done = event is not None and event.state == "done"
    recorded = read_manifest(left.directory)
    if recorded is None:
        if left.directory.manifest.exists() or left.checkpoint is not None:
            return left.stands("stale", "its manifest.json is missing or damaged")
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
        missing = _missing_output(stage, left.directory, left.checkpoint) if done else None
        if missing and left.checkpoint is None:
            reasons.append(missing)
        if reasons:
            return left.stands("stale", "; ".join(reasons))
        if missing:  # a damaged last checkpoint was removed, and an older one is still there
            return left.stands("pending", missing)
    if event is None:
        return left.stands("pending", "it has output but no line in the ledger")
    if stage.kind == "gate" and (damage := damaged_verdict(left.directory, event)):
        return left.stands("pending", damage)
    if event.state == "running" and not left.directory.is_running():
        return left.stands("failed", "its launcher was killed")
    return left.stands(event.state, event.cause)


def _missing_output(
    stage: Stage, directory: StageDirectory, checkpoint: Checkpoint | None
) -> str | None:
    if stage.measures:
        return None if directory.results.exists() else "its results.json is missing"
    if stage.kind == "export":
        return None if directory.exported.exists() else "its exported model is missing"
    if checkpoint is None:
        return "it has no checkpoint"
    if checkpoint.step != stage.steps and ended_early(checkpoint) is None:
        return f"its newest checkpoint is at step {checkpoint.step} of {stage.steps}"
    return None
