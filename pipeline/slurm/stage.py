"""One stage as a job of Slurm's: what `braid stage` does in a stage script."""

from __future__ import annotations

import os
import time

from rich.console import Console

from pipeline import report
from pipeline.attempt import attempt
from pipeline.config import load_cluster
from pipeline.errors import BraidError
from pipeline.gates import refuse_stopped
from pipeline.graph import Stage
from pipeline.launcher import JobFailed, Launcher, Programs, to_the_end
from pipeline.ledger import Ledger
from pipeline.placement import Placement, ThisMachine
from pipeline.progress import Screen
from pipeline.run_directory import LOCK_PATIENCE_SECONDS, RunDirectory
from pipeline.runner import refuse_stale
from pipeline.selection import refuse_missing_inputs
from pipeline.signals import STOP_SIGNALS, TIME_IS_UP, Signals, Stopped
from pipeline.slurm.nodes import place
from pipeline.slurm.queue import call
from pipeline.slurm.settings import ClusterSettings
from pipeline.slurm.steps import SlurmJob, job_number
from stages.settings import RunSettings

SPARE_SECONDS = 15.0  # of the warning's, to write the ledger in and to go back into the queue
OTHER_JOB_SECONDS = 120.0  # what the job before this one, on a node that was lost, may take to end
REQUEUED_SECONDS = 300.0  # what Slurm may take to end a job that goes back into its queue


def run_stage(
    run: RunDirectory, settings: RunSettings, stage: Stage, console: Console, programs: Programs
) -> None:
    """Run one stage, in the job that this process is the script of, or else on this machine.

    In a job, a stage whose time is up saves and goes back into the queue, and so does one that
    failed for no reason that anything gave, unless it did so from the same step too often.

    Raises:
        StaleStages, BraidError: it cannot start.
        JobFailed: it failed.
        Stopped: a signal asked for it.
    """
    states = refuse_stale(run, settings, [stage])
    if states[stage.name].state == "done":
        console.print(f"{stage.name} is done already", highlight=False)
        return
    refuse_missing_inputs([stage], states)
    refuse_stopped(run, [stage], states)
    in_a_job = "SLURM_JOB_ID" in os.environ
    number = job_number() if in_a_job else None
    cluster = load_cluster(run.cluster) if run.cluster.exists() else ClusterSettings()
    try:
        _attempt(run, settings, stage, console, programs, cluster, number)
    except (JobFailed, Stopped) as ended:
        if number is None or (why := _to_try_again(ended)) is None:
            raise
        _go_back(run, stage, cluster, number, why, ended)
    if stage.kind == "evaluate":
        console.print(report.results_table(report.write_results(run)))


def _attempt(
    run: RunDirectory,
    settings: RunSettings,
    stage: Stage,
    console: Console,
    programs: Programs,
    cluster: ClusterSettings,
    number: str | None,
) -> None:
    placement: Placement = ThisMachine(settings.engine)
    patience, save_seconds = LOCK_PATIENCE_SECONDS, 30.0
    if number is not None:
        nodes = call(["scontrol", "show", "hostnames"]).split()
        places = place(nodes, settings.layout, settings.engine, cluster, samples=stage.needs_engine)
        placement = SlurmJob(places, settings.engine, cluster)
        patience = OTHER_JOB_SECONDS
        save_seconds = cluster.warning_seconds - SPARE_SECONDS
    engines = run.stage(stage.name).engines
    with (
        Signals((*STOP_SIGNALS, TIME_IS_UP)) as signals,
        Screen(console) as screen,
        Launcher(engines, settings, programs, placement, signals, save_seconds) as launcher,
    ):
        to_the_end(attempt(run, settings, stage, launcher, screen, stage.name, number, patience))


def _to_try_again(ended: JobFailed | Stopped) -> str | None:
    """Why the stage should go on in another slice or on other nodes; None where it should not."""
    if isinstance(ended, Stopped):
        return "the walltime is near" if ended.number == TIME_IS_UP else None
    return ended.cause if ended.failure.lost else None


def _go_back(
    run: RunDirectory,
    stage: Stage,
    cluster: ClusterSettings,
    number: str,
    why: str,
    ended: JobFailed | Stopped,
) -> None:
    """Put this job back into the queue, which ends this process.

    Raises what ended the attempt, where too many began at the same step.
    """
    ledger = Ledger(run.ledger)
    starts: dict[int, str] = {}
    for event in ledger.events():
        if event.stage == stage.name and event.state == "running":
            starts.setdefault(event.attempt, event.cause)
    newest = f"from step {step}" if (step := _step(run, stage)) else "from the start"
    alike = 0
    for start in reversed(starts.values()):
        if start != newest:
            break
        alike += 1
    if alike > cluster.restarts:
        ended.add_note(
            f"{alike} attempts in a row started {newest} and saved no step beyond it (restarts = "
            f"{cluster.restarts}); mend the cause, raise the walltime or save more often, and "
            "submit again"
        )
        raise ended
    attempts = run.stage(stage.name).attempts()
    ledger.append(stage.name, "submitted", f"job {number} again: {why}", attempts, job=number)
    call(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]])
    time.sleep(REQUEUED_SECONDS)
    raise BraidError(f"job {number} went back into the queue and was not ended")


def _step(run: RunDirectory, stage: Stage) -> int | None:
    checkpoint = run.stage(stage.name).newest_checkpoint()
    return checkpoint.step if checkpoint else None
