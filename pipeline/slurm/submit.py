"""A run's stages as jobs of Slurm's that wait for one another."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel.files import write_atomically
from pipeline.config.cluster import ClusterSettings
from pipeline.config.violations import shown
from pipeline.config.yaml_core import dump
from pipeline.errors import BraidError
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import Stage
from pipeline.run.run import Run
from pipeline.run.states import StageState
from pipeline.slurm.nodes import size_options
from pipeline.slurm.queue import SlurmError, call
from pipeline.slurm.refusals import explained
from stages.settings import RunSettings

SCRIPTS = Path(__file__).parents[2] / "slurm"
SCRIPT_OF = {"mixed": "grpo"}  # kinds that share another one's script
IN_THE_QUEUE = ("submitted", "running")


@dataclass(frozen=True)
class Submission:
    """One job, or an array of them, one a stage. `after` are the jobs it waits for: numbers of
    Slurm's, or of submissions before this one as `{2}`, with `_1` for a stage of an array."""

    stages: tuple[Stage, ...]
    options: tuple[str, ...]
    script: Path
    arguments: tuple[str, ...]
    after: tuple[str, ...]

    def command(self, numbers: Sequence[str]) -> list[str]:
        """The command line, where the submissions before this one got these numbers."""
        return [*self._sbatch, *self._dependency(numbers), str(self.script), *self.arguments]

    def shell(self, variables: Sequence[str]) -> str:
        """Return the command line for a shell whose `variables`, such as `${job_0}`, hold the
        numbers of the submissions before this one. The shell expands nothing else."""
        # In double quotes, which is safe for the numbers of jobs and these variables alone.
        waits = [f'"{option}"' for option in self._dependency(variables)]
        before, behind = shlex.join(self._sbatch), shlex.join([str(self.script), *self.arguments])
        return " ".join([before, *waits, behind])

    @property
    def _sbatch(self) -> list[str]:
        return ["sbatch", "--parsable", *self.options]

    def _dependency(self, numbers: Sequence[str]) -> list[str]:
        if not self.after:
            return []
        waited = ":".join(each.format(*numbers) for each in self.after)
        # Slurm would else leave a job in the queue for ever that one before it has failed.
        return [f"--dependency=afterok:{waited}", "--kill-on-invalid-dep=yes"]

    def job(self, number: str, stage: Stage) -> str:
        """The number of one stage's job, where the submission got this one."""
        return number if len(self.stages) == 1 else f"{number}_{self.stages.index(stage)}"


def submissions(
    run: Run,
    cluster: ClusterSettings,
    wanted: Sequence[Stage],
    states: Mapping[str, StageState],
) -> list[Submission]:
    """The jobs of every stage that is wanted, not done and not in the queue, in the order of the
    graph. Experts that wait for the same stages are one array."""
    job_of = {
        name: state.job
        for name, state in states.items()
        if state.state in IN_THE_QUEUE and state.job is not None
    }
    for stage in wanted:
        if states[stage.name].state == "running" and stage.name not in job_of:
            raise BraidError(f"stage {stage.name} runs outside of Slurm; submit when it has ended")
    left = [
        stage for stage in wanted if states[stage.name].state != "done" and stage.name not in job_of
    ]
    found: list[Submission] = []
    while left:
        first = left[0]
        alike = [first]
        if first.kind == "grpo":
            others = [each for each in left[1:] if each.kind == "grpo"]
            alike += [each for each in others if each.waits_for == first.waits_for]
        left = [each for each in left if each not in alike]
        after = tuple(job_of[name] for name in first.waits_for if name in job_of)
        submission = _submission(run, cluster, alike, after)
        for stage in alike:
            job_of[stage.name] = submission.job(f"{{{len(found)}}}", stage)
        found.append(submission)
    return found


def submit(
    run: RunDirectory,
    submissions: Iterable[Submission],
    cluster: ClusterSettings,
    profile: Path,
    lock: int,
) -> Iterator[tuple[Stage, str]]:
    """Hand everything to Slurm; gives the number of every stage's job. The file
    `RunDirectory.submitting` is there until all of them are in the ledger, so that whoever asks
    where the run stands asks Slurm for the others too. sbatch holds the `lock` of submissions:
    where we are killed and it is not, nothing else is submitted before it ends.

    Raises:
        SlurmError: Slurm refused one; those before it are in the queue, and in the ledger. The
            message has the keys of `profile` that the refusal speaks of.
    """
    write_atomically(run.submitting, "")
    numbers: list[str] = []
    for submission in submissions:
        try:
            answer = call(submission.command(numbers), keep=[lock])
        except SlurmError as error:
            raise explained(error, submission.stages[0].kind, cluster, profile) from error
        lines = answer.split() or [""]
        number = lines[-1].partition(";")[0]  # `17;cluster` where there are several
        if not number.isdecimal():
            raise SlurmError(f"sbatch told no job's number: {answer!r}")
        numbers.append(number)
        for stage in submission.stages:
            job = submission.job(numbers[-1], stage)
            attempt = run.stage(stage.name).attempts()
            run.ledger.submitted(stage.name, f"as job {job}", attempt, job)
            yield stage, job
    run.submitting.unlink(missing_ok=True)


def script_of(submissions: Sequence[Submission]) -> str:
    """A script of the very commands that submit everything."""
    lines = ["#!/bin/bash", "# What `braid submit` does.", "set -euo pipefail"]
    variables = [f"${{job_{index}}}" for index in range(len(submissions))]
    for index, submission in enumerate(submissions):
        names = " ".join(stage.name for stage in submission.stages)
        lines += ["", f"# {names}", f"job_{index}=$({submission.shell(variables)})"]
    return "\n".join(lines) + "\n"


def write_scripts(
    run: RunDirectory, cluster: ClusterSettings, submissions: Sequence[Submission]
) -> None:
    """Write what the stage scripts read of the cluster, and beside it the script of the commands
    that submit them."""
    text = dump(cluster.model_dump(mode="json"))
    write_atomically(run.cluster, text)
    here = shlex.quote(str(Path(sys.executable).parent))
    setup = ["# Sourced by the stage scripts.", f"export PATH={here}:$PATH", *cluster.setup]
    write_atomically(run.setup_script, "\n".join(setup) + "\n")
    write_atomically(run.submission, script_of(submissions))


def script_for(stage: Stage) -> Path:
    """Return the path of the script that runs a stage."""
    return SCRIPTS / f"{SCRIPT_OF.get(stage.kind, stage.kind)}.sbatch"


def refuse_too_large_engines(
    settings: RunSettings, cluster: ClusterSettings, stages: Iterable[Stage]
) -> None:
    """Raise BraidError where no node has room for an engine."""
    for kind in dict.fromkeys(stage.kind for stage in stages if stage.needs_engine):
        room = cluster.of_kind(kind).ranks_per_node
        if settings.engine.tensor > room:
            whose = f" for {kind}" if room != cluster.ranks_per_node else ""
            raise BraidError(
                f"engine.tensor = {settings.engine.tensor} is more than the cluster's "
                f"ranks_per_node = {room}{whose}, and an engine stands on one node"
            )


def _submission(
    run: Run,
    cluster: ClusterSettings,
    stages: Sequence[Stage],
    after: tuple[str, ...],
) -> Submission:
    first, settings = stages[0], run.settings
    cluster = cluster.of_kind(first.kind)
    alone = len(stages) == 1
    script = script_for(first)
    if not script.exists():
        raise BraidError(f"{shown(script)} is missing: install braid from a checkout of it")
    logs = run.slurm.absolute() / ("%x-%j.out" if alone else "%x-%A_%a.out")
    options = [
        f"--job-name={run.name}.{first.name if alone else 'experts'}",
        *size_options(settings.layout, settings.engine if first.needs_engine else None, cluster),
        f"--time={cluster.walltime}",
        f"--signal=B:USR1@{cluster.warning_seconds}",
        f"--output={logs}",
    ]
    if not alone:
        at_once = f"%{cluster.experts_at_once}" if cluster.experts_at_once else ""
        options.append(f"--array=0-{len(stages) - 1}{at_once}")
    asked = {
        "account": cluster.account,
        "partition": cluster.partition,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "mem": cluster.memory_per_node,
    }
    options += [f"--{name}={value}" for name, value in asked.items() if value is not None]
    arguments = (str(run.path.absolute()), *(stage.name for stage in stages))
    return Submission(tuple(stages), (*options, *cluster.options), script, arguments, after)
