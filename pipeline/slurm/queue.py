"""Slurm's own commands, and what its queue says of a run's jobs. Needs no accounting."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from pipeline.errors import BraidError
from pipeline.run.states import QueuedJob

PATIENCE_SECONDS = 60.0  # a busy controller answers late
SEPARATOR = "\x1f"  # in no name and in no path
# The last two are the folder that a job was submitted in, and its script with the arguments.
QUEUE_FORMAT = SEPARATOR.join(("%i", "%T", "%r", "%M", "%l", "%N", "%j", "%Z", "%o"))
SCRIPT_ENDS = ".sbatch "


class SlurmError(BraidError):
    """A command of Slurm's failed, or there is no Slurm here."""


def call(command: Sequence[str], keep: Sequence[int] = ()) -> str:
    """What a command of Slurm's printed. It holds these descriptors too, though we be killed.

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
            pass_fds=keep,
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


def queued(run: Path, numbers: Iterable[str]) -> dict[str, QueuedJob]:
    """The jobs of the run in a folder that wait, run or end now, by number, `17` or `17_2` of an
    array: those of these `numbers`, and those that are to run a stage of it by their arguments.
    Numbers are given out again: a job that is another run's is not meant.

    Raises SlurmError when Slurm does not answer.
    """
    wanted, here = set(numbers), run.resolve()
    lines = call(["squeue", "--me", "--noheader", "--array", f"--format={QUEUE_FORMAT}"])
    asked_for = lru_cache(maxsize=None)(partial(_stages, here))  # tasks of an array ask alike
    found = {}
    for line in lines.splitlines():
        parts = line.split(SEPARATOR)
        if len(parts) != 9:
            continue
        *told, folder, command = parts
        stages = asked_for(folder, command)
        job = replace(QueuedJob(*told), stage=_task(told[0], stages or []))
        may_be = stages is None and ("." not in job.name or job.name.startswith(f"{run.name}."))
        if job.stage is not None or (job.number in wanted and (stages or may_be)):
            found[job.number] = job
    return found


def _stages(here: Path, folder: str, command: str) -> list[str] | None:
    """The stages of the run `here` that a job's command is to run, of which there are none in
    another run; None of a command that is no stage script."""
    _, script, arguments = command.partition(SCRIPT_ENDS)
    if not script:
        return None
    words = arguments.split(" ")
    # A path may have spaces, which nothing sets apart; the name of a stage has none, and no slash.
    first = max((index for index, word in enumerate(words) if "/" in word), default=0) + 1
    for count in range(first, len(words)):
        if Path(folder, " ".join(words[:count])).resolve() == here:
            return words[count:]
    return []


def _task(number: str, stages: Sequence[str]) -> str | None:
    """The stage of a job, or of the task of an array, that has this number."""
    if len(stages) == 1:
        return stages[0]
    task = number.partition("_")[2]
    return stages[int(task)] if task.isdecimal() and int(task) < len(stages) else None
