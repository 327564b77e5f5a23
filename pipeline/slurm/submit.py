"""Submission of a run's stages to Slurm, as jobs that depend on each other."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel.engine.platform import check_cpu_engine
from parallel.errors import UserError
from parallel.files import write_atomically
from parallel.machine.slots import check_engine_size
from pipeline.config.cluster import ClusterSettings
from pipeline.config.unroll import GATE_PREFIX
from pipeline.config.validate import place_in_cluster
from pipeline.config.yaml_core import dump
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import Stage
from pipeline.run.run import Run, StageState
from pipeline.slurm.places import SLOTS_OF_A_NODE, size_options
from pipeline.slurm.queue import SlurmError, call, comment_of
from pipeline.text import shown
from stages.data.reasoning_gym_options import HASH_SEED
from stages.settings import RunSettings, check_turns

SCRIPTS = Path(__file__).parents[2] / "slurm"
IN_THE_QUEUE = ("submitted", "running")
GPUS = ("gpus_per_node", "gpu_type")
# Words of sbatch's refusals (slurm_errno.c and its option parser), in lower case, and the keys of a
# cluster's profile that they mean.
REFUSED_KEYS = {
    "account": ("account",),
    "partition": ("partition",),
    "qos": ("qos",),
    "generic resource": GPUS,
    "gres": GPUS,
    "gpus": GPUS,
    "feature": ("constraint",),
    "time limit": ("walltime",),
    "--time": ("walltime",),
    "--signal": ("warning_seconds",),
    "memory": ("memory_per_node",),
    "--mem": ("memory_per_node",),
    "node configuration": ("ranks_per_node", "cpus_per_rank", *GPUS),
    "reservation": ("options",),
    "--begin": ("options",),
    "option": ("options",),
}


@dataclass(frozen=True)
class Submission:
    """A job, or an array of jobs with one stage each.

    `after` lists the jobs it waits for: Slurm's numbers, or earlier submissions by index, as `{2}`,
    with `_1` for a task of an array.
    """

    stages: tuple[Stage, ...]
    options: tuple[str, ...]
    script: Path
    arguments: tuple[str, ...]
    after: tuple[str, ...]

    def command(self, numbers: Sequence[str]) -> list[str]:
        """Return the command line, given the numbers of the earlier submissions."""
        return [*self._sbatch, *self._dependency(numbers), str(self.script), *self.arguments]

    def shell(self, variables: Sequence[str]) -> str:
        """Return the command line for a shell, which expands nothing but `variables`.

        They hold the numbers of the earlier submissions, such as `${job_0}`.
        """
        # Double quotes are safe here only: job numbers and these variables need no escapes.
        waits = [f'"{option}"' for option in self._dependency(variables)]
        target = shlex.join([str(self.script), *self.arguments])
        return " ".join([shlex.join(self._sbatch), *waits, target])

    @property
    def _sbatch(self) -> list[str]:
        return ["sbatch", "--parsable", *self.options]

    def _dependency(self, numbers: Sequence[str]) -> list[str]:
        waited = ":".join(job.format(*numbers) for job in self.after)
        # Without the second option, a job whose dependency failed stays in the queue for ever.
        return [f"--dependency=afterok:{waited}", "--kill-on-invalid-dep=yes"] if waited else []

    def job(self, number: str, stage: Stage) -> str:
        """Return the number of a stage's job, given the number of the submission."""
        return number if len(self.stages) == 1 else f"{number}_{self.stages.index(stage)}"


def submissions(
    run: Run, cluster: ClusterSettings, stages: Sequence[Stage], states: Mapping[str, StageState]
) -> list[Submission]:
    """Return the jobs of the stages that are neither done nor in the queue, in graph order.

    Stages of one block and kind that wait for the same jobs share an array.
    """
    job_of = {
        name: state.job
        for name, state in states.items()
        if state.state in IN_THE_QUEUE and state.job is not None
    }
    for stage in stages:
        if states[stage.name].state == "running" and stage.name not in job_of:
            raise UserError(f"stage {stage.name} runs outside Slurm; submit when it has ended")
    left = [
        stage for stage in stages if states[stage.name].state != "done" and stage.name not in job_of
    ]
    # By name: a stage that waits for one that is submitted later is not of an earlier array.
    unfinished = job_of.keys() | {stage.name for stage in left}
    arrays: dict[tuple[str | None, str, frozenset[str]], list[Stage]] = {}
    for stage in left:
        waits = frozenset(unfinished.intersection(stage.waits_for))
        arrays.setdefault((stage.block, stage.kind, waits), []).append(stage)
    planned: list[Submission] = []
    for alike in arrays.values():  # by their first stages, so after all that they wait for
        after = tuple(job_of[name] for name in alike[0].waits_for if name in job_of)
        submission = _submission(run, cluster, alike, after)
        for stage in alike:
            job_of[stage.name] = submission.job(f"{{{len(planned)}}}", stage)
        planned.append(submission)
    return planned


def submit(
    run: RunDirectory,
    submissions: Iterable[Submission],
    cluster: ClusterSettings,
    profile: Path,
    lock: int,
) -> Iterator[tuple[Stage, str]]:
    """Submit everything to Slurm; yield every stage with its job's number.

    The file `RunDirectory.submitting` exists until all jobs are in the ledger, so that `status`
    asks Slurm for jobs that the ledger lacks. sbatch inherits the `lock` of submissions: if this
    process is killed and sbatch is not, nothing else is submitted before sbatch ends.

    Raises:
        SlurmError: sbatch refused a job; the earlier ones are in the queue and in the ledger. The
            message names the keys of `profile` that the refusal is about.
    """
    write_atomically(run.submitting, "")
    numbers: list[str] = []
    for submission in submissions:
        try:
            answer = call(submission.command(numbers), keep=[lock])
        except SlurmError as error:
            raise _with_keys(error, submission.stages[0], cluster, profile) from error
        lines = answer.split() or [""]
        number = lines[-1].partition(";")[0]  # `17;cluster` on a federation
        if not number.isdecimal():
            raise SlurmError(f"sbatch printed no job number: {answer!r}")
        numbers.append(number)
        for stage in submission.stages:
            job, attempt = submission.job(number, stage), run.stage(stage.name).attempts()
            run.ledger.submitted(stage.name, f"as job {job}", attempt, job)
            yield stage, job
    run.submitting.unlink(missing_ok=True)


def script_of(submissions: Sequence[Submission]) -> str:
    """Return a shell script of the commands that submit everything."""
    lines = ["#!/bin/bash", "# The commands of `braid submit`.", "set -euo pipefail"]
    lines.append("unset SLURM_CLUSTERS SBATCH_CLUSTERS  # braid asks the cluster of SLURM_CONF")
    for index, command in enumerate(shell_commands(submissions)):
        names = " ".join(stage.name for stage in submissions[index].stages)
        # sbatch prints `17;CLUSTER` where there are several.
        number = f"job_{index}=${{job_{index}%%;*}}"
        lines += ["", f"# {names}", f"job_{index}=$({command})", number]
    return "\n".join(lines) + "\n"


def shell_commands(submissions: Sequence[Submission]) -> list[str]:
    """Return the shell command of each submission; `${job_N}` is the number of the Nth."""
    variables = [f"${{job_{index}}}" for index in range(len(submissions))]
    return [submission.shell(variables) for submission in submissions]


def write_scripts(
    run: RunDirectory, cluster: ClusterSettings, profile: Path, submissions: Sequence[Submission]
) -> None:
    """Write the cluster's profile and setup for the stage scripts, and `script_of` beside them.

    `profile` is the file that the profile was read from: the run's own copy, or another.
    """
    write_atomically(run.cluster, dump(cluster.model_dump(mode="json")))
    if profile.resolve() != run.cluster.resolve():
        write_atomically(run.profile_source, str(profile.absolute()))
    here = shlex.quote(str(Path(sys.executable).parent))
    setup = ["# Sourced by the stage scripts.", f"export PATH={here}:$PATH"]
    if (seed := os.environ.get(HASH_SEED)) is not None:
        # sbatch hands its environment on, but not with --export=NONE, nor from another shell.
        setup.append(f"export {HASH_SEED}={shlex.quote(seed)}")
    write_atomically(run.setup_script, "\n".join([*setup, *cluster.setup]) + "\n")
    write_atomically(run.submission, script_of(submissions))


def script_for(stage: Stage) -> Path:
    """Return the path of the script that runs a stage."""
    return SCRIPTS / f"{stage.declared.script or stage.kind}.sbatch"


def check_engines(settings: RunSettings, cluster: ClusterSettings, stages: Sequence[Stage]) -> None:
    """Raise UserError where a cluster's nodes cannot hold the engines, or not by turns.

    Whole nodes of a kind must hold an engine, and engines on the trainer's GPUs must leave them
    while it computes.
    """
    for kind in dict.fromkeys(stage.kind for stage in stages if stage.needs_engine):
        room = cluster.of_kind(kind).ranks_per_node
        of_kind = f" for {kind}" if room != cluster.ranks_per_node else ""
        check_engine_size(settings.engine, room, SLOTS_OF_A_NODE + of_kind)
        if not cluster.of_kind(kind).gpus_per_node:
            check_cpu_engine(settings.model)
    if any(cluster.of_kind(stage.kind).gpus_per_node for stage in stages if stage.takes_turns):
        check_turns(settings)


def _submission(
    run: Run, cluster: ClusterSettings, stages: Sequence[Stage], after: tuple[str, ...]
) -> Submission:
    stage, settings = stages[0], run.settings
    cluster = cluster.of_kind(stage.kind)
    alone = len(stages) == 1
    script = script_for(stage)
    if not script.exists():
        raise UserError(
            f"{shown(script)} is missing; install braid from a checkout, or, for a kind of another"
            f" package, name the script that runs it: StageKind(script=...) of {stage.kind}"
        )
    logs = run.slurm.absolute() / ("%x-%j.out" if alone else "%x-%A_%a.out")
    options = [
        f"--job-name={run.name}.{stage.name if alone else _array_name(stage)}",
        f"--comment={comment_of(run, stages)}",
        *size_options(settings.layout, settings.engine if stage.needs_engine else None, cluster),
        f"--time={cluster.walltime}",
        f"--signal=B:USR1@{cluster.warning_seconds}",
        f"--output={logs}",
    ]
    if not alone:
        throttle = f"%{cluster.array_task_throttle}" if cluster.array_task_throttle else ""
        options.append(f"--array=0-{len(stages) - 1}{throttle}")
    optional = {
        "account": cluster.account,
        "partition": cluster.partition,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "mem": cluster.memory_per_node,
    }
    options += [f"--{name}={value}" for name, value in optional.items() if value is not None]
    arguments = (str(run.path.absolute()), *(stage.name for stage in stages))
    return Submission(tuple(stages), (*options, *cluster.options), script, arguments, after)


def _array_name(stage: Stage) -> str:
    """Return the name of an array of a block's stages, or of their gates."""
    return f"{GATE_PREFIX}{stage.block}" if stage.declared.judges else str(stage.block)


def _with_keys(
    error: SlurmError, stage: Stage, cluster: ClusterSettings, profile: Path
) -> SlurmError:
    """Return sbatch's refusal of a stage, with the keys of the profile that it is about."""
    message = str(error).lower()
    keys = [key for words, keys in REFUSED_KEYS.items() if words in message for key in keys]
    if not keys:
        return error
    lines = [f"{error}\nthe cluster's profile sets:"]
    for key in dict.fromkeys(keys):
        where, value = key, getattr(cluster, key)
        # `kinds` lacks the keys that hold for all stages alike.
        if (of_kind := getattr(cluster.kinds.get(stage.kind), key, None)) not in (None, ()):
            where, value = f"kinds.{stage.kind}.{key}", of_kind
        if value in (None, ()):
            lines.append(f"{shown(profile)}: {where}: is not set")
        else:
            place = place_in_cluster(profile, tuple(where.split(".")))
            lines.append(f"{place}: {where}: {json.dumps(value)}")
    return SlurmError("\n  ".join(lines))
