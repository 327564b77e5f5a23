"""Takes a run from where it stands to its end, and keeps the ledger of it."""

from __future__ import annotations

import time
from pathlib import Path

from pipeline.errors import BraidError
from pipeline.graph import Stage, compile_graph
from pipeline.jobs import stage_job
from pipeline.launcher import JobFailed, Launcher, Programs, Stopped
from pipeline.ledger import Ledger, latest
from pipeline.lineage import lineage_now, write_manifest
from pipeline.progress import Display
from pipeline.run_directory import RunDirectory
from pipeline.states import StageState, derive
from pipeline.violations import shown
from stages.settings import RunSettings


class StaleStages(BraidError):
    """Finished or half-finished work no longer matches what it was made from."""

    def __init__(self, run: RunDirectory, stale: dict[str, StageState]) -> None:
        lines = [f"{name}: {state.cause}" for name, state in stale.items()]
        folders = " ".join(shown(run.stage(name).path) for name in stale)
        super().__init__(
            "\n  ".join(["stages no longer match what they were made from:", *lines])
            + f"\nrestore what changed, or make them anew by deleting {folders}"
        )


def run_stages(
    run: RunDirectory, settings: RunSettings, display: Display, programs: Programs | None = None
) -> None:
    """Run every stage that is not done, in order. The caller holds the run's lock.

    Raises:
        StaleStages: before anything is started.
        JobFailed: a stage failed; those before it are done.
        Stopped: a signal asked for it.
    """
    stages = compile_graph(settings)
    ledger = Ledger(run.ledger)
    _close_abandoned(run, ledger)
    states = derive(run, settings, stages)
    _refuse_stale(run, ledger, states)
    with Launcher(run, settings, programs) as launcher:
        for number, stage in enumerate(stages, start=1):
            if states[stage.name].state != "done":
                display.stage(stage.name, number, len(stages), stage.steps)
                _run_stage(run, settings, stage, launcher, ledger, display)


def _run_stage(
    run: RunDirectory,
    settings: RunSettings,
    stage: Stage,
    launcher: Launcher,
    ledger: Ledger,
    display: Display,
) -> None:
    directory = run.stage(stage.name)
    attempt = directory.attempts() + 1
    job = stage_job(stage, settings, run, attempt)
    write_manifest(directory, lineage_now(stage, settings, run))
    checkpoint = directory.newest_checkpoint()
    cause = f"from step {checkpoint.step}" if checkpoint else "from the start"
    ledger.append(stage.name, "running", cause, attempt)
    started = time.monotonic()
    with display.watching(directory.metrics):
        try:
            launcher.execute(job, display.poll)
        except JobFailed as error:
            seconds = time.monotonic() - started
            ledger.append(stage.name, "failed", error.cause, attempt, seconds)
            raise
        except Stopped as error:
            seconds = time.monotonic() - started
            ledger.append(stage.name, "pending", str(error), attempt, seconds)
            raise
    ledger.append(stage.name, "done", "finished", attempt, time.monotonic() - started)


def _close_abandoned(run: RunDirectory, ledger: Ledger) -> None:
    """A launcher that was killed wrote no end of its attempt: count it to its last sign of life."""
    for event in latest(ledger.events()).values():
        if event.state == "running":
            directory = run.stage(event.stage)
            signs = [*directory.attempt(event.attempt).glob("*.log"), directory.metrics]
            seen = max((_modified(path) for path in signs), default=0.0)
            seconds = max(0.0, seen - event.timestamp)
            ledger.append(event.stage, "failed", "its launcher was killed", event.attempt, seconds)


def _refuse_stale(run: RunDirectory, ledger: Ledger, states: dict[str, StageState]) -> None:
    stale = {name: state for name, state in states.items() if state.state == "stale"}
    for name, state in stale.items():
        ledger.append(name, "stale", state.cause, state.attempts)
    if stale:
        raise StaleStages(run, stale)


def _modified(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0
