"""One attempt at a stage: its lineage, its job, and its lines in the ledger."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from pipeline.errors import BraidError, reason
from pipeline.launch.jobs import stage_job
from pipeline.launch.launcher import JobFailed, Launcher, Work
from pipeline.launch.progress import Screen
from pipeline.launch.signals import Stopped
from pipeline.run.directory import LOCK_PATIENCE_SECONDS, RunDirectory, StageDirectory
from pipeline.run.gates import ending, tell_verdict
from pipeline.run.graph import Stage
from pipeline.run.ledger import Ledger, State, latest
from pipeline.run.lineage import lineage_now, write_manifest
from pipeline.run.stale import refuse_stale
from pipeline.run.states import lacks
from stages.settings import RunSettings


def attempt(
    run: RunDirectory,
    settings: RunSettings,
    stage: Stage,
    launcher: Launcher,
    screen: Screen,
    title: str,
    slurm_job: str | None = None,
    patience: float = LOCK_PATIENCE_SECONDS,
) -> Work:
    """Try a stage, yielding whenever there is nothing to do but wait. Another launcher that works
    on it may take `patience` seconds to end.

    Raises:
        StaleStages: what was left of it, or an input, was made from something else.
        JobFailed: it failed.
        Stopped: a signal asked for it.
        RunLocked: another launcher works on it.
    """
    ledger = Ledger(run.ledger)
    with run.lock_stage(stage.name, patience, launcher.check):
        close_abandoned(run, ledger, [stage])
        # Whoever had the lock before may have left other work than was there when we looked.
        if refuse_stale(run, settings, [stage])[stage.name].state == "done":
            return
        with (
            screen.watching(title, stage.steps, run.stage(stage.name).metrics) as view,
            _recorded(run, settings, stage, ledger, slurm_job) as number,
        ):
            job = stage_job(stage, settings, run, number)
            note = partial(ledger.append, stage.name, "running", attempt=number, job=slurm_job)
            try:
                yield from launcher.execute(job, view, note)
            except JobFailed as failed:
                view.say(f"failed: {failed.cause}")
                raise
        tell_verdict(run, stage, view.say)


@contextmanager
def _recorded(
    run: RunDirectory, settings: RunSettings, stage: Stage, ledger: Ledger, slurm_job: str | None
) -> Iterator[int]:
    """Write the lineage of a new attempt, and its beginning and its end into the ledger."""
    directory = run.stage(stage.name)
    number = directory.attempts() + 1
    directory.verdict.unlink(missing_ok=True)  # a gate's last one is not that of this attempt
    write_manifest(directory, lineage_now(stage, settings, run))
    ledger.append(stage.name, "running", start_of(directory), number, job=slurm_job)
    started = time.monotonic()
    try:
        yield number
        if lack := lacks(stage, directory):
            raise BraidError(f"stage {stage.name} ended as if it were done, but {lack}")
        cause = ending(run, settings, stage)
    except BaseException as error:
        state: State = "pending" if isinstance(error, Stopped) else "failed"
        why = "its launcher was ended"
        if isinstance(error, Exception):
            why = error.cause if isinstance(error, JobFailed) else reason(error)
        try:
            ledger.append(stage.name, state, why, number, time.monotonic() - started, slurm_job)
        except OSError as unwritten:
            error.add_note(f"the ledger does not tell so: {reason(unwritten)}")
        raise
    ledger.append(stage.name, "done", cause, number, time.monotonic() - started)


def start_of(directory: StageDirectory) -> str:
    """What an attempt that begins now builds on, in words."""
    if checkpoint := directory.newest_checkpoint():
        return f"from step {checkpoint.step}"
    measured = len(list(directory.measured.glob("*.json")))
    return f"from {measured} measured models" if measured else "from the start"


def close_abandoned(run: RunDirectory, ledger: Ledger, stages: Iterable[Stage]) -> None:
    """A launcher that was killed wrote no end of its attempt: count it to its last sign of life."""
    events = ledger.events()
    newest = latest(events)
    for stage in stages:
        event = newest.get(stage.name)
        if event is not None and event.state == "running":
            job = run.stage(event.stage).job(event.attempt)
            # The newest event may be a notice, written when the attempt had run for a while.
            begun = event
            for earlier in reversed([each for each in events if each.stage == event.stage]):
                if (earlier.state, earlier.attempt) != ("running", event.attempt):
                    break
                begun = earlier
            seen = job.stat().st_mtime if job.exists() else begun.timestamp
            seconds = max(0.0, seen - begun.timestamp)
            ledger.append(event.stage, "failed", "its launcher was killed", event.attempt, seconds)
