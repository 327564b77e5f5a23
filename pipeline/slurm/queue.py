"""Slurm's own commands, and what its queue says of a run's jobs. Needs no accounting."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.errors import BraidError

PATIENCE_SECONDS = 60.0  # a busy controller answers late
QUEUE_FORMAT = "%i|%T|%r|%M|%l|%N|%j"
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")


class SlurmError(BraidError):
    """A command of Slurm's failed, or there is no Slurm here."""


@dataclass(frozen=True)
class QueuedJob:
    """A job in the queue."""

    number: str
    state: str
    reason: str
    elapsed: str
    limit: str
    nodes: str
    name: str = ""

    @property
    def waits(self) -> bool:
        """Whether it has not begun, or not begun again."""
        return self.state in WAITING

    def describe(self) -> str:
        """In a few words, for a person."""
        if self.waits:
            return f"job {self.number} waits: {self.reason}"
        return f"job {self.number} on {self.nodes}, {self.elapsed} of {self.limit}"


def call(command: Sequence[str]) -> str:
    """What a command of Slurm's printed.

    Raises SlurmError when there is no such command, or it fails or says nothing for a minute.
    """
    try:
        found = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=PATIENCE_SECONDS,
            check=False,
            # Of the job that we may be in ourselves, nothing is to reach another one.
            env={
                name: value
                for name, value in os.environ.items()
                if not name.startswith("SLURM_") or name == "SLURM_CONF"
            },
        )
    except FileNotFoundError as error:
        raise SlurmError(
            f"there is no {command[0]} here; submit from a machine that has Slurm's commands"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{command[0]} said nothing for {PATIENCE_SECONDS:g} s") from error
    if found.returncode:
        raise SlurmError(f"{command[0]} failed: {' '.join(found.stderr.split())}")
    return found.stdout


def is_here() -> bool:
    """Whether this machine has Slurm's commands."""
    return shutil.which("squeue") is not None


def queued(run: str, numbers: Iterable[str]) -> dict[str, QueuedJob]:
    """Those of a run's jobs, `17` or `17_2` of an array, that wait, run or end now, by number.
    Numbers are given out again: a job that is named after another run is not meant.

    Raises SlurmError when Slurm does not answer.
    """
    wanted = set(numbers)
    if not wanted:
        return {}
    lines = call(["squeue", "--me", "--noheader", "--array", f"--format={QUEUE_FORMAT}"])
    found = {}
    for line in lines.splitlines():
        parts = line.split("|", 6)
        if len(parts) == 7 and parts[0] in wanted:
            job = QueuedJob(*parts)
            if "." not in job.name or job.name.startswith(f"{run}."):
                found[job.number] = job
    return found
