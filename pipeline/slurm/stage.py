"""The launcher of one stage inside a Slurm job: `braid stage`, which the stage scripts call."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Sequence
from itertools import takewhile

from rich.console import Console

from parallel.errors import UserError
from parallel.machine.gpus import visible_gpus
from parallel.machine.slots import check_gpu_count
from pipeline.config.cluster import ClusterSettings
from pipeline.config.validate import load_cluster
from pipeline.estimate.capacity import machine_shares
from pipeline.launch.launcher import SAVE_SECONDS, JobFailed, Launcher, run_to_the_end
from pipeline.launch.placement import Placement, Programs, ThisMachine
from pipeline.launch.processes import STOP_SIGNALS, TIME_IS_UP, Signals, Stopped
from pipeline.launch.progress import Screen
from pipeline.launch.runner import attempt, start_of
from pipeline.run.directory import LOCK_TIMEOUT_SECONDS
from pipeline.run.gates import check_stopped
from pipeline.run.graph import Stage
from pipeline.run.ledger import PUT_ASIDE, Event, latest
from pipeline.run.metrics import Models
from pipeline.run.run import Run
from pipeline.run.select import check_dependencies, check_stale
from pipeline.slurm.places import Places, cpus_of, place, size_options, too_few_cpus
from pipeline.slurm.queue import SlurmError, call
from pipeline.slurm.steps import SlurmJob
from pipeline.slurm.submit import script_for
from pipeline.text import reason, shown

WAIT = "run those first, or make this job wait for theirs: sbatch --dependency=afterok:JOB"
SPARE_SECONDS = 15.0  # of the warning time, kept for the ledger and the requeue
OTHER_JOB_SECONDS = 120.0  # how long the previous job, on a lost node, may hold the stage's lock
ALREADY_REQUEUED = "Job is pending execution"  # scontrol's answer if Slurm requeued the job first
CONTROLLER_SECONDS = 5.0  # between two attempts to reach the controller
REQUEUED_SECONDS = 300.0  # how long Slurm may take to end a requeued job


def stage_of_task(names: Sequence[str]) -> str:
    """Return the one stage of `names`, or that of this job's task of an array.

    Raises UserError if there are several and no task.
    """
    task = os.environ.get("SLURM_ARRAY_TASK_ID", "")
    if len(names) == 1:
        return names[0]
    if not task.isdecimal() or int(task) >= len(names):
        last = len(names) - 1
        raise UserError(f"{len(names)} stages need a job array; use sbatch --array=0-{last}")
    return names[int(task)]


def run_stage(run: Run, stage: Stage, console: Console, programs: Programs) -> Models | None:
    """Run one stage in this process's Slurm job, or without one on this machine.

    A job requeues itself when its time is up, after the stage has saved, and when the stage fails
    for a reason outside its own processes, unless it did so too often from the same step.

    Returns:
        The run's results after an evaluation that ran, else None.

    Raises:
        StaleStages, UserError: the stage cannot start.
        JobFailed: the stage failed.
        Stopped: a signal stopped it.
    """
    job_id = os.environ.get("SLURM_JOB_ID")
    if job_id is not None and "SLURM_ARRAY_TASK_ID" in os.environ:  # as `squeue --array` shows it
        job_id = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    check_stale(run, [stage])
    states = run.states
    if states[stage.name].state == "done":
        console.print(f"{stage.name} is done already", highlight=False)
        return None
    cluster = load_cluster(run.cluster) if run.cluster.exists() else ClusterSettings()
    cluster = cluster.of_kind(stage.kind)
    # Read before the attempt: a refusal is recorded only where the attempt recorded nothing.
    newest = latest(run.ledger.events()).get(stage.name)
    try:
        check_dependencies([stage], states, WAIT)
        check_stopped(run, [stage], states)
        _attempt(run, stage, console, programs, cluster, job_id)
    except (JobFailed, Stopped) as ended:
        # For more time, or for other nodes.
        if isinstance(ended, Stopped):
            why = "the walltime is near" if ended.number == TIME_IS_UP else None
        else:
            why = ended.failure.cause if ended.failure.lost else None
        if job_id is None or why is None:
            raise
        _requeue_self(run, stage, cluster, job_id, why, ended)
    except UserError as refusal:
        if job_id is not None:
            _record_refusal(run, stage, job_id, refusal, newest)
        raise
    return run.write_results() if stage.declared.evaluates else None


def _record_refusal(
    run: Run, stage: Stage, job_id: str, refusal: UserError, newest: Event | None
) -> None:
    """Record why a job could not start its stage, for whoever submitted it by hand.

    Record nothing where the attempt has recorded it, or another job works on the stage.
    """
    event = latest(run.ledger.events()).get(stage.name)
    active = event is not None and event.state in ("submitted", "running")
    if event == newest and (event is None or not active or event.job == job_id):
        cause = f"job {job_id} was refused: {' '.join(reason(refusal).split())}"
        run.ledger.append(stage.name, "failed", cause, run.stage(stage.name).attempts(), job=job_id)


def _attempt(
    run: Run,
    stage: Stage,
    console: Console,
    programs: Programs,
    cluster: ClusterSettings,
    job_id: str | None,
) -> None:
    """Run one attempt at the stage on the nodes of Slurm job `job_id`; on this machine if None."""
    settings = run.settings
    lock_timeout, save_seconds = LOCK_TIMEOUT_SECONDS, SAVE_SECONDS
    placement: Placement
    if job_id is None:
        [share] = machine_shares(1, settings, [stage])
        placement = ThisMachine(settings.engine, gpus=share.gpus)
    else:
        listed = os.environ["SLURM_JOB_NODELIST"]
        nodes = call(["scontrol", "show", "hostnames", listed]).split()
        places = place(nodes, settings.layout, settings.engine, cluster, samples=stage.needs_engine)
        _check_cpus(run, stage, cluster, nodes, places)
        if cluster.gpus_per_node:
            check_gpu_count(visible_gpus(), cluster.gpus_per_node, nodes[0])
        placement = SlurmJob(places, cluster)
        lock_timeout = OTHER_JOB_SECONDS
        save_seconds = cluster.warning_seconds - SPARE_SECONDS
    engines = run.stage(stage.name).engines
    with (
        Signals((*STOP_SIGNALS, TIME_IS_UP)) as signals,
        Screen(console) as screen,
        Launcher(engines, settings, programs, placement, signals, save_seconds) as launcher,
    ):
        if isinstance(placement, SlurmJob):
            placement.prepare(run.slurm / f"container-{job_id}.log", signals.check)
        work = attempt(run, stage, launcher, screen, stage.name, job_id, lock_timeout)
        run_to_the_end(work)


def _check_cpus(
    run: Run, stage: Stage, cluster: ClusterSettings, nodes: Sequence[str], places: Places
) -> None:
    """Raise UserError where srun would refuse: by default sbatch asks for one CPU a node."""
    cpus = cpus_of(os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    shortage = too_few_cpus(places, run.settings.layout.ranks, nodes, cpus, cluster.cpus_per_rank)
    if shortage is None:
        return
    node, has, takes = shortage
    engine = run.settings.engine if stage.needs_engine else None
    sizes = size_options(run.settings.layout, engine, cluster)
    command = ["sbatch", *sizes, shown(script_for(stage)), shown(run.path), stage.name]
    where = f"{shown(run.submission)} has all options of the cluster's profile"
    if not run.submission.exists():
        where = "braid submit CONFIG --cluster PROFILE --prepare writes all options"
    raise UserError(
        f"{node} has {has} CPU{'s' if has > 1 else ''} for this job, and {stage.name} needs {takes}"
        f" there; submit it with: {shlex.join(command)}\n{where}"
    )


def _requeue_self(
    run: Run,
    stage: Stage,
    cluster: ClusterSettings,
    job_id: str,
    why: str,
    ended: JobFailed | Stopped,
) -> None:
    """Requeue this job, which ends this process; raise `ended` after too many attempts."""
    ledger, directory = run.ledger, run.stage(stage.name)
    newest, starts = start_of(directory), _starts(ledger.events(), stage)
    alike = len(list(takewhile(lambda start: start == newest, reversed(starts))))
    if alike > cluster.restarts:
        ended.add_note(
            f"{alike} attempts in a row started {newest} and made no progress (restarts = "
            f"{cluster.restarts}); fix the cause, raise the walltime or save more often, then "
            "submit again"
        )
        raise ended
    attempts = directory.attempts()
    # Recorded first: Slurm ends this process as soon as it requeues the job.
    ledger.append(stage.name, "submitted", f"job {job_id} again: {why}", attempts, job=job_id)
    try:
        requeue(job_id)
    except SlurmError as error:
        cause = f"{why}, and the job could not be requeued: {error}"
        ledger.append(stage.name, "pending", cause, attempts)
        ended.add_note(f"{error}; submit again")
        raise ended from error
    # Slurm's signal ends this process here.
    time.sleep(REQUEUED_SECONDS)
    raise UserError(f"job {job_id} was requeued, but Slurm did not end it")


def _starts(events: Sequence[Event], stage: Stage) -> list[str]:
    """Return where each attempt of the stage started, since its newest job or rerun."""
    starts: dict[int, str] = {}
    job = None
    for event in events:
        if event.stage != stage.name:
            continue
        if event.job not in (None, job) or event.cause.startswith(PUT_ASIDE):
            starts, job = {}, event.job
        if event.state == "running":
            starts.setdefault(event.attempt, event.cause)
    return list(starts.values())


def requeue(job_id: str) -> None:
    """Requeue a job, or one task of an array; wait for a controller that is away.

    After a node failure Slurm may have requeued it already.

    Raises:
        SlurmError: the controller refuses, or stays away.
    """
    deadline = time.monotonic() + REQUEUED_SECONDS
    while True:
        try:
            call(["scontrol", "requeue", job_id])
            return
        except SlurmError as error:
            if ALREADY_REQUEUED in str(error):
                return
            if "contact" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(CONTROLLER_SECONDS)
