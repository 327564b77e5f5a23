"""Takes a run from where it stands to its end, and keeps the ledger of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from rich.console import Console

from pipeline.errors import BraidError, reason
from pipeline.gates import ending, refuse_stopped, tell_verdict
from pipeline.graph import Stage, compile_graph
from pipeline.jobs import stage_job
from pipeline.launcher import JobFailed, Launcher, Programs, Stopped
from pipeline.ledger import Ledger, State, latest
from pipeline.lineage import lineage_now, write_manifest
from pipeline.progress import watching
from pipeline.run_directory import RunDirectory
from pipeline.selection import chosen, refuse_missing_inputs, to_make_anew
from pipeline.states import StageState, derive, lacks
from pipeline.violations import shown
from stages.settings import RunSettings


class StaleStages(BraidError):
    """Finished or half-finished work no longer matches what it was made from."""

    def __init__(
        self, run: RunDirectory, stages: Sequence[Stage], stale: dict[str, StageState]
    ) -> None:
        lines = [f"{name}: {state.cause}" for name, state in stale.items()]
        super().__init__(
            "\n  ".join(["stages no longer match what they were made from:", *lines])
            + "\nrestore what changed, or make them anew, and all that follows them, with\n"
            f"{to_make_anew(stages, stale)}; what they left is kept in {shown(run.replaced)}"
        )


def run_stages(
    run: RunDirectory,
    settings: RunSettings,
    console: Console,
    programs: Programs,
    only: Iterable[str] = (),
) -> None:
    """Run every stage that is not done, or `only` some of them, in order. The caller holds the
    run's lock.

    Raises:
        StaleStages: before anything is started.
        BraidError: `only` names no stage, or one that lacks what it is made from.
        GateStopped: a gate has stopped, now or before.
        JobFailed: a stage failed; those before it are done.
        Stopped: a signal asked for it.
    """
    stages = compile_graph(settings)
    ledger = Ledger(run.ledger)
    _close_abandoned(run, ledger)
    wanted = chosen(run, stages, only)
    states = refuse_stale(run, settings, wanted)
    refuse_missing_inputs(wanted, states)
    refuse_stopped(run, wanted, states)
    with Launcher(run, settings, programs) as launcher:
        for number, stage in enumerate(stages, start=1):
            if stage not in wanted or states[stage.name].state == "done":
                continue
            title = f"[{number}/{len(stages)}] {stage.name}"
            with (
                watching(console, title, stage.steps, run.stage(stage.name).metrics) as view,
                _recorded(run, settings, stage, ledger) as attempt,
            ):
                job = stage_job(stage, settings, run, attempt)
                launcher.execute(job, view, partial(_note, ledger, stage, attempt))
            tell_verdict(run, stage, view.say)


def _note(ledger: Ledger, stage: Stage, attempt: int, notice: str) -> None:
    ledger.append(stage.name, "running", notice, attempt)


def refuse_stale(
    run: RunDirectory, settings: RunSettings, wanted: Sequence[Stage]
) -> dict[str, StageState]:
    """The state of every stage.

    Raises:
        StaleStages: finished or half-finished work of a stage that is wanted, or of an input of
            one, was made from other settings or inputs.
    """
    stages = compile_graph(settings)
    states = derive(run, settings, stages)
    touched = {name for stage in wanted for name in (stage.name, *stage.inputs)}
    stale = {
        name: state for name, state in states.items() if name in touched and state.state == "stale"
    }
    for name, state in stale.items():
        Ledger(run.ledger).append(name, "stale", state.cause, state.attempts)
    if stale:
        raise StaleStages(run, stages, stale)
    return states


@contextmanager
def _recorded(
    run: RunDirectory, settings: RunSettings, stage: Stage, ledger: Ledger
) -> Iterator[int]:
    """Write the lineage of a new attempt, and its beginning and its end into the ledger."""
    directory = run.stage(stage.name)
    attempt = directory.attempts() + 1
    write_manifest(directory, lineage_now(stage, settings, run))
    checkpoint = directory.newest_checkpoint()
    cause = f"from step {checkpoint.step}" if checkpoint else "from the start"
    ledger.append(stage.name, "running", cause, attempt)
    started = time.monotonic()
    try:
        yield attempt
        if lack := lacks(stage, directory):
            raise BraidError(f"stage {stage.name} ended as if it were done, but {lack}")
        cause = ending(run, settings, stage)
    except Exception as error:
        state: State = "pending" if isinstance(error, Stopped) else "failed"
        why = error.cause if isinstance(error, JobFailed) else reason(error)
        try:
            ledger.append(stage.name, state, why, attempt, time.monotonic() - started)
        except OSError as unwritten:
            error.add_note(f"the ledger does not tell so: {reason(unwritten)}")
        raise
    ledger.append(stage.name, "done", cause, attempt, time.monotonic() - started)


def _close_abandoned(run: RunDirectory, ledger: Ledger) -> None:
    """A launcher that was killed wrote no end of its attempt: count it to its last sign of life."""
    events = ledger.events()
    for event in latest(events).values():
        if event.state == "running":
            job = run.stage(event.stage).job(event.attempt)
            # The newest event may be a notice, written when the attempt had run for a while.
            begun = next(e for e in events if (e.stage, e.attempt) == (event.stage, event.attempt))
            seen = job.stat().st_mtime if job.exists() else begun.timestamp
            seconds = max(0.0, seen - begun.timestamp)
            ledger.append(event.stage, "failed", "its launcher was killed", event.attempt, seconds)
