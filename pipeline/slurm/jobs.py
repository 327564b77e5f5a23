"""The jobs of a run, as its ledger and Slurm's queue know them."""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.errors import reason
from pipeline.ledger import Ledger, latest
from pipeline.run_directory import RunDirectory
from pipeline.slurm.queue import QueuedJob, SlurmError, queued


def job_numbers(run: RunDirectory) -> dict[str, str]:
    """The number of the newest job of every stage that is not done and had one."""
    events = latest(Ledger(run.ledger).events())
    return {
        name: event.job
        for name, event in events.items()
        if event.job is not None and event.state != "done"
    }


def queue_of(run: RunDirectory) -> tuple[Mapping[str, QueuedJob] | None, str]:
    """The run's jobs that Slurm still has, by number; None where it was not asked, with what a
    person should know about that."""
    numbers = job_numbers(run)
    if not numbers:
        return None, ""
    try:
        return queued(numbers.values()), ""
    except SlurmError as error:
        return None, f"Slurm was not asked about this run's jobs: {reason(error)}"
