"""The jobs of a run, as its ledger and Slurm's queue know them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pipeline.config.violations import shown
from pipeline.errors import BraidError, reason
from pipeline.run.directory import RunDirectory
from pipeline.run.ledger import Event, latest
from pipeline.run.run import Run
from pipeline.run.states import QueuedJob
from pipeline.slurm.queue import SlurmError, is_here, queued
from pipeline.text import say


def job_numbers(events: Iterable[Event]) -> dict[str, str]:
    """The number of the newest job of every stage that is not done and had one, by a run's
    `events`."""
    found: dict[str, str] = {}
    for event in events:
        if event.state == "done":
            found.pop(event.stage, None)
        elif event.job is not None:
            found[event.stage] = event.job
    return found


def queue_of(run: Run) -> tuple[Mapping[str, QueuedJob] | None, str]:
    """The jobs of a run that Slurm still has, by number: those of its ledger, and those that
    never came into it. None where it was not asked, with what a person should know about
    that."""
    numbers = job_numbers(run.events)
    if not numbers and not run.submitting.exists():
        return None, ""
    try:
        return queued(run.path, numbers.values()), ""
    except SlurmError as error:
        return None, f"Slurm was not asked about this run's jobs: {reason(error)}"


def is_queued(run: RunDirectory, number: str) -> bool:
    """Return whether Slurm still has a job of the run; False where it does not answer."""
    try:
        return number in queued(run.path, [number])
    except SlurmError:
        return False


def check_not_queued(run: Run) -> None:
    """Raise BraidError where Slurm has jobs of the run, or is here and does not say: they would
    begin the same stages, with what this changes, or find the run locked."""
    jobs, unasked = queue_of(run)
    if jobs:
        numbers = ", ".join(jobs)
        raise BraidError(
            f"{shown(run.path)} has jobs in Slurm's queue: {numbers}; wait for them, or take them "
            f"out with: braid cancel {shown(run.path)}"
        )
    if unasked and is_here():
        raise BraidError(f"{unasked}; try again when it answers")
    if unasked:
        say(unasked)


def adopt(run: Run) -> Mapping[str, QueuedJob]:
    """The jobs of a run that Slurm has, by number. The ledger gets a line for each that it does not
    name: `braid submit` was killed before it wrote one or never heard sbatch's answer, or a person
    submitted it. The caller holds the lock of submissions.

    Raises SlurmError when Slurm does not answer.
    """
    numbers = job_numbers(run.events)
    if not numbers and not run.cluster.exists() and not is_here():  # nothing was ever submitted
        return {}
    found = queued(run.path, numbers.values())
    done = {event.stage for event in latest(run.events).values() if event.state == "done"}
    for job in found.values():
        # One that is done stays so: a job for it looks, and ends.
        if job.stage in done:
            continue
        if job.stage is not None and numbers.get(job.stage) not in found:
            numbers[job.stage] = job.number
            cause = f"as job {job.number}, which was in the queue"
            run.ledger.submitted(job.stage, cause, run.stage(job.stage).attempts(), job.number)
    run.refresh()
    return found
