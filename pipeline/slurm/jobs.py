"""The jobs of a run, as its ledger and Slurm's queue know them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pipeline.errors import reason
from pipeline.ledger import Event
from pipeline.run_directory import RunDirectory
from pipeline.slurm.queue import QueuedJob, SlurmError, queued


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


def queue_of(
    run: RunDirectory, events: Iterable[Event]
) -> tuple[Mapping[str, QueuedJob] | None, str]:
    """The jobs of a run's `events` that Slurm still has, by number; None where it was not asked,
    with what a person should know about that."""
    numbers = job_numbers(events)
    if not numbers:
        return None, ""
    try:
        return queued(run.name, numbers.values()), ""
    except SlurmError as error:
        return None, f"Slurm was not asked about this run's jobs: {reason(error)}"
