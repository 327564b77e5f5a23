"""Slurm's queue: its commands, and the jobs of a run. Needs no accounting database."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from parallel.errors import UserError
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import Stage
from pipeline.run.ledger import Event, latest
from pipeline.run.run import QueuedJob, Run, StageState
from pipeline.text import reason, shown, warn

PATIENCE_SECONDS = 60.0  # a busy controller answers late
LOGIN_NODE = "run this on a login node of the cluster, which has Slurm's commands"
SEPARATOR = "\x1f"  # in no reason, no path and no stage's name
# A job's number in the queue: `17`, `17_2` or the waiting tasks `17_[3-9%2]` of an array, `17+1`.
NUMBER = re.compile(r"[0-9]+(_([0-9]+|\[[0-9,:%-]+\]))?(\+[0-9]+)?")
CLUSTER = re.compile(r"CLUSTER: \S+")
LONGEST_SHOWN = 80  # characters of a line that cannot be read
QUEUE_FORMAT = SEPARATOR.join(("%i", "%T", "%r", "%M", "%l", "%N", "%k"))  # %k: the comment


class SlurmError(UserError):
    """A Slurm command that failed, or a machine without Slurm."""


def call(command: Sequence[str], keep: Sequence[int] = ()) -> str:
    """Return the output of a Slurm command.

    The command also holds the file descriptors `keep`, so that a lock outlives this process.

    Raises:
        SlurmError: there is no such command, it fails, or it prints nothing for a minute.
    """
    try:
        completed = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=PATIENCE_SECONDS,
            check=False,
            pass_fds=keep,
            env={name: value for name, value in os.environ.items() if not _is_option(name)},
        )
    except FileNotFoundError as error:
        raise SlurmError(f"there is no {command[0]} here; {LOGIN_NODE}") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{command[0]} printed nothing for {PATIENCE_SECONDS:g} s") from error
    if completed.returncode:
        message = " ".join(completed.stderr.split()) or f"exit {completed.returncode}"
        # squeue refuses nobody: it lacks a configuration or does not reach the controller.
        elsewhere = command[0] == "squeue" or "controller" in message
        raise SlurmError(f"{command[0]} failed: {message}{f'; {LOGIN_NODE}' if elsewhere else ''}")
    return completed.stdout


def _is_option(name: str) -> bool:
    """Return whether Slurm's commands take an environment variable for an option.

    sbatch takes SLURM_* variables: inside a job, this job's would reach the other one. SQUEUE_* and
    SCANCEL_* hide jobs from squeue and scancel, and *_CLUSTERS sends jobs to another cluster than
    these look at. Other SBATCH_* variables are the user's defaults, which a profile overrides.
    """
    if name.startswith("SLURM_"):
        return name != "SLURM_CONF"
    return name.startswith(("SQUEUE_", "SCANCEL_")) or name == "SBATCH_CLUSTERS"


def is_here() -> bool:
    """Return whether this machine has Slurm's commands."""
    return shutil.which("squeue") is not None


def check_answers(run: RunDirectory) -> None:
    """Raise SlurmError where Slurm is here and does not answer; called before a run is written.

    A machine without Slurm may write a run's commands for another one.
    """
    if is_here():
        queued(run.path, ())


def comment_of(run: RunDirectory, stages: Iterable[Stage]) -> str:
    """Return the comment by which `queued` finds a job: RUN/STAGE, or RUN/STAGE,STAGE of an array.

    A stage's name has no comma and no slash.
    """
    return f"{run.path.absolute()}/{','.join(stage.name for stage in stages)}"


def queued(run: Path, numbers: Iterable[str]) -> dict[str, QueuedJob]:
    """Return a run's jobs that wait, run or are ending, by number: `17`, or `17_2` of an array.

    A job belongs to the run that its comment names. One without such a comment, which a person
    submitted, belongs to it if its number is in `numbers`, from the run's ledger.

    Raises:
        SlurmError: Slurm does not answer, or not in the format that was requested.
    """
    recorded, here = set(numbers), run.resolve()
    text = call(["squeue", "--me", "--noheader", "--array", f"--format={QUEUE_FORMAT}"])
    rows = [_fields(line) for line in _job_lines(text)]
    jobs = [(row[:-1], *row[-1].rpartition("/")[::2]) for row in rows]
    runs = {path for _, path, _ in jobs if path.startswith("/")}
    ours = {path for path in runs if Path(path).resolve() == here}
    by_number = {}
    for fields, path, names in jobs:
        stage, stages, task = None, names.split(","), fields[0].partition("_")[2]
        if path in ours and len(stages) == 1:
            [stage] = stages
        elif path in ours and task.isdecimal() and int(task) < len(stages):
            stage = stages[int(task)]  # not of a range of waiting tasks, such as 3_[1-2]
        # Slurm reuses numbers: the ledger's may be another run's job by now.
        if stage is not None or (fields[0] in recorded and path not in runs):
            by_number[fields[0]] = replace(QueuedJob(*fields), stage=stage)
    return by_number


def _job_lines(text: str) -> list[str]:
    """Return the lines of jobs in squeue's output.

    With -M, which a wrapper may add, squeue prints `CLUSTER: NAME` above each cluster's jobs, with
    --noheader too, and an empty line before the next (`_multi_cluster` in Slurm's squeue.c).

    Raises:
        SlurmError: it lists several clusters, two of which may have jobs of one number.
    """
    lines = [line for line in text.split("\n") if line]
    clusters = [line for line in lines if CLUSTER.fullmatch(line)]
    if len(clusters) > 1:
        names = ", ".join(line.partition(" ")[2] for line in clusters)
        raise SlurmError(
            f"squeue lists the jobs of {len(clusters)} clusters ({names}), and a run's are of one; "
            "check the wrapper that adds -M to squeue"
        )
    return [line for line in lines if line not in clusters]


def _fields(line: str) -> list[str]:
    """Return the fields of QUEUE_FORMAT in a line of squeue.

    A line that is skipped could be a job, which would seem to have left the queue.

    Raises:
        SlurmError: it is in another format, or its job's number is none that scancel may get.
    """
    fields = line.split(SEPARATOR, QUEUE_FORMAT.count(SEPARATOR))
    if len(fields) == 1 + QUEUE_FORMAT.count(SEPARATOR) and NUMBER.fullmatch(fields[0]):
        return fields
    raise SlurmError(
        f"squeue printed a line that cannot be read: {line[:LONGEST_SHOWN]!a}; check what squeue "
        "--me prints: a wrapper's text, or a job's comment with a line break in it"
    )


def job_numbers(events: Iterable[Event]) -> dict[str, str]:
    """Return the number of the newest job of every stage that is not done, by a run's `events`."""
    numbers: dict[str, str] = {}
    for event in events:
        if event.state == "done":
            numbers.pop(event.stage, None)
        elif event.job is not None:
            numbers[event.stage] = event.job
    return numbers


def queue_of(run: Run) -> tuple[Mapping[str, QueuedJob] | None, str]:
    """Return a run's jobs in the queue, by number, and a note for the user.

    The jobs are None where Slurm was not asked; the note says why that matters, if it does.
    """
    numbers = job_numbers(run.events)
    if not numbers and not run.submitting.exists():
        return None, ""
    try:
        return queued(run.path, numbers.values()), ""
    except SlurmError as error:
        return None, f"Slurm was not asked about this run's jobs: {reason(error)}"


def states_now(run: Run) -> dict[str, StageState]:
    """Return every stage's state by the ledger and Slurm's queue."""
    return run.states_with(queue_of(run)[0])


def is_queued(run: RunDirectory, number: str) -> bool:
    """Return whether a job of the run is in the queue; False where Slurm does not answer."""
    try:
        return number in queued(run.path, [number])
    except SlurmError:
        return False


def check_not_queued(run: Run) -> None:
    """Raise UserError if the run has jobs in the queue, or Slurm is here and does not answer.

    Such jobs would start the same stages with changed files, or find the run locked.
    """
    jobs, unasked = queue_of(run)
    if jobs:
        raise UserError(
            f"{shown(run.path)} has jobs in Slurm's queue: {', '.join(jobs)}; wait for them, or "
            f"cancel them with: braid cancel {shown(run.path)}"
        )
    if unasked and is_here():
        raise UserError(f"{unasked}; try again when it answers")
    if unasked:
        warn([unasked])


def adopt(run: Run) -> Mapping[str, QueuedJob]:
    """Return a run's jobs in the queue, by number; record those that its ledger lacks.

    The ledger lacks a job if `braid submit` was killed before it recorded it, or a person submitted
    it. The caller holds the lock of submissions.

    Raises:
        SlurmError: Slurm does not answer.
    """
    numbers = job_numbers(run.events)
    if not numbers and not run.cluster.exists() and not is_here():  # nothing was ever submitted
        return {}
    jobs = queued(run.path, numbers.values())
    done = {event.stage for event in latest(run.events).values() if event.state == "done"}
    for job in jobs.values():
        # A finished stage stays done: its job finds it so and ends.
        if job.stage is None or job.stage in done or numbers.get(job.stage) in jobs:
            continue
        numbers[job.stage] = job.number
        cause = f"as job {job.number}, which was in the queue"
        run.ledger.submitted(job.stage, cause, run.stage(job.stage).attempts(), job.number)
    run.refresh()
    return jobs
