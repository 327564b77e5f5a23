"""The jobs of a run, as its ledger and Slurm's queue know them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pipeline.errors import reason
from pipeline.ledger import Event, latest
from pipeline.slurm.queue import QueuedJob, SlurmError, queued


def job_numbers(events: Iterable[Event]) -> dict[str, str]:
    """The number of the newest job of every stage that is not done and had one, by a run's
    `events`."""
    return {
        name: event.job
        for name, event in latest(events).items()
        if event.job is not None and event.state != "done"
    }


def queue_of(events: Iterable[Event]) -> tuple[Mapping[str, QueuedJob] | None, str]:
    """The jobs of a run's `events` that Slurm still has, by number; None where it was not asked,
    with what a person should know about that."""
    numbers = job_numbers(events)
    if not numbers:
        return None, ""
    try:
        return queued(numbers.values()), ""
    except SlurmError as error:
        return None, f"Slurm was not asked about this run's jobs: {reason(error)}"
