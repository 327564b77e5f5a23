"""One stage as a job of Slurm's: what `braid stage` does in a stage script."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence

from rich.console import Console

from pipeline.config.cluster import ClusterSettings
from pipeline.config.validate import load_cluster
from pipeline.config.violations import shown
from pipeline.errors import BraidError, reason
from pipeline.launch.launcher import JobFailed, Launcher, Programs, run_to_the_end
from pipeline.launch.placement import Placement, ThisMachine
from pipeline.launch.processes import STOP_SIGNALS, TIME_IS_UP, Signals, Stopped
from pipeline.launch.progress import Screen
from pipeline.launch.runner import attempt, start_of
from pipeline.report import tables as report
from pipeline.run.directory import LOCK_PATIENCE_SECONDS
from pipeline.run.gates import check_stopped
from pipeline.run.graph import Stage
from pipeline.run.ledger import PUT_ASIDE, Event, latest
from pipeline.run.results import write_results
from pipeline.run.run import Run
from pipeline.run.select import check_dependencies, check_stale
from pipeline.slurm.nodes import Places, cpus_of, place, size_options, too_few_cpus
from pipeline.slurm.queue import SlurmError, call
from pipeline.slurm.steps import SlurmJob, job_number
from pipeline.slurm.submit import script_for

WAIT = "run those first, or have this job wait for theirs: sbatch --dependency=afterok:JOB"
SPARE_SECONDS = 15.0  # of the warning's, to write the ledger in and to go back into the queue
OTHER_JOB_SECONDS = 120.0  # what the job before this one, on a node that was lost, may take to end
IN_THE_QUEUE = "Job is pending execution"  # what scontrol says where Slurm was faster
CONTROLLER_SECONDS = 5.0  # between two tries to reach a controller that is away
REQUEUED_SECONDS = 300.0  # what Slurm may take to end a job that goes back into its queue


def run_stage(run: Run, stage: Stage, console: Console, programs: Programs) -> None:
    """Run one stage, in the job that this process is the script of, or else on this machine.

    In a job, a stage whose time is up saves and goes back into the queue, and so does one that
    failed for no reason that anything gave, unless it did so from the same step too often.

    Raises:
        StaleStages, BraidError: it cannot start.
        JobFailed: it failed.
        Stopped: a signal asked for it.
    """
    number = job_number() if "SLURM_JOB_ID" in os.environ else None
    check_stale(run, [stage])
    states = run.states
    if states[stage.name].state == "done":
        console.print(f"{stage.name} is done already", highlight=False)
        return
    cluster = load_cluster(run.cluster) if run.cluster.exists() else ClusterSettings()
    cluster = cluster.of_kind(stage.kind)
    newest = latest(run.ledger.events()).get(stage.name)
    try:
        check_dependencies([stage], states, WAIT)
        check_stopped(run, [stage], states)
        _attempt(run, stage, console, programs, cluster, number)
    except (JobFailed, Stopped) as ended:
        if number is None or (why := _to_try_again(ended)) is None:
            raise
        _go_back(run, stage, cluster, number, why, ended)
    except BraidError as refusal:
        if number is not None:
            _note(run, stage, number, refusal, newest)
        raise
    if stage.kind == "evaluate":
        console.print(report.results_table(write_results(run)))


def _note(run: Run, stage: Stage, number: str, refusal: BraidError, newest: Event | None) -> None:
    """Have the ledger say why a job could not start its stage: whoever submitted it by hand looks
    there first. Not where its attempt has said so, or another job has to do with the stage."""
    event = latest(run.ledger.events()).get(stage.name)
    under_way = event is not None and event.state in ("submitted", "running")
    if event == newest and (event is None or not under_way or event.job == number):
        cause = f"job {number} was refused: {' '.join(reason(refusal).split())}"
        run.ledger.append(stage.name, "failed", cause, run.stage(stage.name).attempts(), job=number)


def _attempt(
    run: Run,
    stage: Stage,
    console: Console,
    programs: Programs,
    cluster: ClusterSettings,
    number: str | None,
) -> None:
    settings = run.settings
    placement: Placement = ThisMachine(settings.engine)
    patience, save_seconds = LOCK_PATIENCE_SECONDS, 30.0
    if number is not None:
        listed = os.environ["SLURM_JOB_NODELIST"]
        nodes = call(["scontrol", "show", "hostnames", listed]).split()
        places = place(nodes, settings.layout, settings.engine, cluster, samples=stage.needs_engine)
        _refuse_too_few_cpus(run, stage, cluster, nodes, places)
        placement = SlurmJob(places, settings.engine, cluster)
        patience = OTHER_JOB_SECONDS
        save_seconds = cluster.warning_seconds - SPARE_SECONDS
    engines = run.stage(stage.name).engines
    with (
        Signals((*STOP_SIGNALS, TIME_IS_UP)) as signals,
        Screen(console) as screen,
        Launcher(engines, settings, programs, placement, signals, save_seconds) as launcher,
    ):
        run_to_the_end(attempt(run, stage, launcher, screen, stage.name, number, patience))


def _refuse_too_few_cpus(
    run: Run,
    stage: Stage,
    cluster: ClusterSettings,
    nodes: Sequence[str],
    places: Places,
) -> None:
    """Raise BraidError where srun would refuse: without options, sbatch asks for one CPU."""
    cpus = cpus_of(os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    found = too_few_cpus(places, run.settings.layout.ranks, nodes, cpus, cluster.cpus_per_rank)
    if found is None:
        return
    node, has, takes = found
    engine = run.settings.engine if stage.needs_engine else None
    sizes = size_options(run.settings.layout, engine, cluster)
    command = ["sbatch", *sizes, shown(script_for(stage)), shown(run.path), stage.name]
    where = f"{shown(run.submission)} has all options of the cluster's profile"
    if not run.submission.exists():
        where = "braid submit CONFIG --cluster PROFILE --prepare writes down all options"
    raise BraidError(
        f"{node} has {has} CPU{'s' if has > 1 else ''} for this job, and what {stage.name} starts "
        f"there takes {takes}; submit it with: {shlex.join(command)}\n{where}"
    )


def _to_try_again(ended: JobFailed | Stopped) -> str | None:
    """Why the stage should go on in another slice or on other nodes; None where it should not."""
    if isinstance(ended, Stopped):
        return "the walltime is near" if ended.number == TIME_IS_UP else None
    return ended.cause if ended.failure.lost else None


def _go_back(
    run: Run,
    stage: Stage,
    cluster: ClusterSettings,
    number: str,
    why: str,
    ended: JobFailed | Stopped,
) -> None:
    """Put this job back into the queue, which ends this process.

    Raises what ended the attempt, where too many began at the same step.
    """
    ledger = run.ledger
    directory = run.stage(stage.name)
    newest, alike = start_of(directory), 0
    for start in reversed(_starts(ledger.events(), stage)):
        if start != newest:
            break
        alike += 1
    if alike > cluster.restarts:
        ended.add_note(
            f"{alike} attempts in a row began {newest} and came no further (restarts = "
            f"{cluster.restarts}); mend the cause, raise the walltime or save more often, and "
            "submit again"
        )
        raise ended
    attempts = directory.attempts()
    ledger.append(stage.name, "submitted", f"job {number} again: {why}", attempts, job=number)
    try:
        go_back_into_the_queue(number)
    except SlurmError as error:
        cause = f"{why}, and the job could not go back into the queue: {error}"
        ledger.append(stage.name, "pending", cause, attempts)
        ended.add_note(f"{error}; submit again")
        raise ended from error
    time.sleep(REQUEUED_SECONDS)
    raise BraidError(f"job {number} went back into the queue and was not ended")


def _starts(events: Sequence[Event], stage: Stage) -> list[str]:
    """What each attempt of the stage began with, since it has this job or was put aside."""
    found: dict[int, str] = {}
    job = None
    for event in events:
        if event.stage != stage.name:
            continue
        if event.job not in (None, job) or event.cause.startswith(PUT_ASIDE):
            found, job = {}, event.job
        if event.state == "running":
            found.setdefault(event.attempt, event.cause)
    return list(found.values())


def go_back_into_the_queue(number: str) -> None:
    """Of an array, this task alone. The controller may be away for a while; where a node failed, it
    may have done it already.

    Raises SlurmError where it refuses, or does not come back.
    """
    deadline = time.monotonic() + REQUEUED_SECONDS
    while True:
        try:
            call(["scontrol", "requeue", number])
            return
        except SlurmError as error:
            if IN_THE_QUEUE in str(error):
                return
            if "contact" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(CONTROLLER_SECONDS)
