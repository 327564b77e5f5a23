"""The commands of Slurm: `braid submit`, `stage` and `cancel`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from parallel.errors import UserError, hint
from parallel.files import write_atomically
from pipeline.commands import common
from pipeline.commands.common import (
    CONFIG_HELP,
    JSON,
    RUN,
    STARTING,
    TRUST,
    Argument,
    command,
    print_json,
)
from pipeline.config.cluster import READ_BY_JOBS, ClusterSettings
from pipeline.config.validate import differing_keys, load_cluster, load_started
from pipeline.estimate.capacity import check_capacity
from pipeline.estimate.gpu_memory import gpus_of, unchecked
from pipeline.report import status as report
from pipeline.run.directory import RunDirectory, check_owner, warn_of_readers
from pipeline.run.edits import moved_lines
from pipeline.run.former import move_renamed
from pipeline.run.gates import check_stopped
from pipeline.run.graph import Stage
from pipeline.run.ledger import State, latest
from pipeline.run.run import Run, StageState, as_done
from pipeline.run.select import (
    check_dependencies,
    check_settings,
    check_stale,
    planned_states,
    unfinished,
)
from pipeline.slurm import queue
from pipeline.slurm import submit as submitting
from pipeline.slurm.queue import SlurmError, adopt, job_numbers, queue_of
from pipeline.slurm.stage import run_stage, stage_of_task
from pipeline.tables import terminal
from pipeline.text import say, shown, warn

IN_FLIGHT: tuple[State, ...] = ("submitted", "running")


@dataclass(frozen=True)
class _Submission:
    """A request of `braid submit`, with the names to `rerun` and to be `reused` from `other`."""

    run: Run
    profile: Path
    cluster: ClusterSettings
    wanted: list[Stage]
    rerun: list[str]
    other: RunDirectory | None
    reused: Mapping[str, str]

    def planned(self, now: Mapping[str, StageState]) -> dict[str, StageState]:
        """Return every stage's state once stages are put aside and reused."""
        return planned_states(self.run, now, self.reused, self.rerun)


@command(
    "submit",
    "submit the unfinished stages of a configuration to Slurm",
    CONFIG_HELP
    + "  braid submit configs/quickstart.yaml --cluster configs/clusters/mine.yaml --dry-run\n"
    "  braid submit configs/quickstart.yaml --cluster configs/clusters/mine.yaml\n"
    "  braid submit runs/quickstart/run.yaml                 resume it, on the same cluster\n"
    "  braid submit runs/quickstart/run.yaml --from merge    and rerun that stage\n\n"
    "Each stage is a job of one of the scripts in slurm/ and waits for the jobs of its inputs.\n"
    "--dry-run shows the sbatch commands and writes nothing; --prepare writes the run's directory\n"
    "with the commands in runs/NAME/slurm/submit.sh, to be run by hand.\n"
    "See docs/explanation/slurm.md.\n\n"
    'JSON: {"run", "jobs": {STAGE: NUMBER}}; with --dry-run {"run", "commands": [{"stages",\n'
    '"command"}], "note"}; with --prepare {"run", "script"}.',
    Argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="the cluster's profile (default: the one of the run's last submission)",
    ),
    (
        Argument(
            "--dry-run", action="store_true", help="show the commands; submit and write nothing"
        ),
        Argument(
            "--prepare",
            action="store_true",
            help="write the run's directory with the commands in it; submit nothing",
        ),
    ),
    JSON,
    *STARTING,
)
def submit(arguments: Namespace) -> None:
    """Submit every unfinished stage to Slurm."""
    asked = _asked(arguments)
    run = asked.run
    if arguments.dry_run:
        _preview(asked, arguments)
        return
    warn_of_readers(run)
    if not run.settings_file.exists():  # checked early, so that no directory is created in vain
        check_dependencies(asked.wanted, as_done(asked.planned(run.states), *IN_FLIGHT))
        queue.check_answers(run)
    with run.lock(shared=True), run.lock_submission() as lock:
        states = _settled(asked)
        jobs = _submissions(asked, states)
        if jobs or arguments.prepare:
            submitting.write_scripts(run, asked.cluster, asked.profile, jobs)
        if arguments.prepare:
            write_atomically(run.submitting, "")
            say(f"nothing is submitted; the commands are in {shown(run.submission)}")
            if arguments.json:
                print_json(arguments, {"run": str(run.path), "script": str(run.submission)})
            return
        numbers = {}
        try:
            for stage, number in submitting.submit(run, jobs, asked.cluster, asked.profile, lock):
                numbers[stage.name] = number
                with suppress(BrokenPipeError):  # a closed pipe must not stop the other submissions
                    say(f"{stage.name}: job {number}", flush=True)
        except SlurmError as error:
            only = "".join(f" --only {name}" for name in arguments.only)
            error.add_note(f"once that is fixed, continue with: {run.resume_command()}{only}")
            raise
    for stage in asked.wanted:
        state = states[stage.name]
        if state.state in ("done", *IN_FLIGHT):
            why = f" ({state.cause})" if state.state != "done" and state.cause else ""
            say(f"{stage.name}: {state.state} already{why}")
    here = shown(run.path)
    say(f"watch it with: braid status {here}; and the output of a stage with:")
    say(f"braid logs {here} STAGE -f")
    if arguments.json:
        print_json(arguments, {"run": str(run.path), "jobs": numbers})


@command(
    "stage",
    "run one stage of a run, as the stage scripts in slurm/ do",
    "  braid stage runs/quickstart experts.chain_sum\n\n"
    "In a Slurm job, ranks and engines are steps of it; elsewhere they run here. `braid run` or\n"
    "`braid submit --prepare` writes the run's directory first.",
    RUN,
    TRUST,
    Argument(
        "stages", metavar="STAGE", nargs="+", help="its name; several in a job array, one a task"
    ),
)
def stage(arguments: Namespace) -> None:
    """Run one stage here, as the stage scripts do; of several, the one of this array task."""
    name = stage_of_task(arguments.stages)
    try:
        common.find(arguments.runs_dir, arguments.run)
    except UserError as error:
        error.add_note("create a run with: braid submit CONFIG --cluster PROFILE --prepare")
        raise
    run = common.load_run_to_start(arguments, [name])
    [wanted] = run.chosen([name])
    with run.lock(shared=True):
        results = run_stage(run, wanted, terminal(), common.PROGRAMS)
    if results is not None:
        print(report.results_table(results, own=run.own_domains))


@command(
    "cancel",
    "cancel a run's Slurm jobs; running stages checkpoint first",
    "  braid cancel quickstart\n  braid cancel quickstart experts.chain_sum",
    RUN,
    TRUST,
    Argument("stages", metavar="STAGE", nargs="*", help="only these stages (default: all)"),
    Argument("--now", action="store_true", help="end running stages without a checkpoint"),
)
def cancel(arguments: Namespace) -> None:
    """Cancel a run's jobs; running stages checkpoint first."""
    run = common.load_trusted_run(arguments)
    names = {stage.name for stage in run.chosen(arguments.stages)}
    with run.lock_submission():
        jobs = adopt(run)
        stages = {number: name for name, number in job_numbers(run.events).items()}
        named = ((job.stage or stages.get(number), job) for number, job in jobs.items())
        queued = [(name, job) for name, job in named if name is not None]
        newest = latest(run.events)
        done = {name for name, event in newest.items() if event.state == "done"}
        names &= {name for name, _ in queued}
        for stage in run.stages:  # dependencies come first
            # Slurm starts jobs that wait for a cancelled task of an array nevertheless.
            if names & {*stage.waits_for}:
                names.add(stage.name)
        wanted = [(name, job) for name, job in queued if name in names]
        if not wanted:
            say(f"{shown(run.path)} has no job in the queue")
        # Waiting jobs first, so that none starts because another one ends.
        for name, job in sorted(wanted, key=lambda item: not item[1].waits):
            gently = [] if job.waits or arguments.now else ["--batch", "--signal=TERM"]
            queue.call(["scancel", *gently, job.number])
            if job.waits and name not in done:
                run.ledger.append(name, "pending", "cancelled", run.stage(name).attempts())
            running = "ends now" if arguments.now else "checkpoints and ends"
            say(f"{name}: {'cancelled' if job.waits else running} (job {job.number})")


def _asked(arguments: Namespace) -> _Submission:
    """Return the request; raise UserError where the arguments, profile or path are invalid."""
    run = common.load_configured_run(arguments)
    common.warn_of_graph(arguments, run.settings)
    check_owner(run, arguments.trust_run)
    profile = arguments.cluster or run.cluster
    if arguments.cluster is None and not run.cluster.exists():
        raise UserError(
            "--cluster FILE is required; cp configs/clusters/example.yaml "
            "configs/clusters/mine.yaml and fill it in"
        )
    if not profile.exists():
        known = [shown(path) for path in sorted(Path("configs/clusters").glob("*.yaml"))]
        others = f"; {hint(str(profile), known)}" if known else ""
        raise UserError(f"--cluster {shown(profile)}: no such file{others}")
    cluster = load_cluster(profile)
    for letter, name in (("%", "%"), ("\n", "line break")):
        if letter in str(run.path.absolute()):
            raise UserError(
                f"{shown(run.path)}: Slurm misreads a {name} in a path; choose another path"
            )
    wanted = run.chosen(arguments.only)
    run.chosen(arguments.rerun)
    other, fork = common.forked(arguments, run)
    submitting.check_engines(run.settings, cluster, run.stages)
    asked = _Submission(run, profile, cluster, wanted, arguments.rerun, other, fork.reused)
    left = unfinished(wanted, asked.planned(run.states))
    check_capacity(run.settings, left, gpus_of(cluster))
    warn(unchecked(cluster, profile, left))
    return asked


def _preview(asked: _Submission, arguments: Namespace) -> None:
    """Show the submission, or raise the error that it would raise; write nothing."""
    run = asked.run
    _check_queued_settings(run)
    check_settings(run, asked.rerun, moved_lines(run))
    again = run.downstream(asked.rerun)
    check_stale(run, [each for each in asked.wanted if each not in again], record=False)
    queued, unasked = queue_of(run)
    jobs = _submissions(asked, asked.planned(run.states_with(queued)))
    if arguments.json:
        commands = [
            {"stages": [each.name for each in job.stages], "command": command}
            for job, command in zip(jobs, submitting.shell_commands(jobs), strict=True)
        ]
        found = {"run": str(run.path), "commands": commands, "note": unasked}
        print_json(arguments, found)
    else:
        say(submitting.script_of(jobs))
        say("# Nothing is written and nothing submitted. To run these commands by hand, --prepare")
        say(f"# writes {shown(run.path)} with this script in it.")
        if unasked:
            say(f"# {unasked}")


def _settled(asked: _Submission) -> dict[str, StageState]:
    """Write the run's settings, put aside and reuse stages; return every stage's state then.

    Raises:
        UserError: the request cannot be met; unless the reason is a stale stage, the run has not
            changed.
    """
    run = asked.run
    _check_queued_settings(run)
    queued = adopt(run)
    before = run.states_with(queued)
    again = [stage.name for stage in run.downstream(asked.rerun)]
    if busy := [name for name in again if before[name].state in IN_FLIGHT]:
        raise UserError(
            f"{', '.join(busy)} cannot be rerun while a job of it waits or runs; cancel it first "
            f"with: braid cancel {shown(run.path)}"
        )
    in_flight = {name for name, state in before.items() if state.job and state.state in IN_FLIGHT}
    with_jobs = [each for each in run.stages if each.name in in_flight]
    _check_queued_profile(run, asked.cluster, with_jobs)
    # `check_stale` refuses stale stages.
    check_dependencies(asked.wanted, as_done(asked.planned(before), "stale", *IN_FLIGHT))
    check_settings(run, asked.rerun, moved_lines(run))
    run.write_settings()
    move_renamed(run)
    if asked.other is not None:
        common.reuse_from(run, asked.other)
    common.rerun(run, asked.rerun)
    check_stale(run, asked.wanted)
    return run.states_with(queued)


def _submissions(
    asked: _Submission, states: Mapping[str, StageState]
) -> list[submitting.Submission]:
    """Return the jobs; raise UserError where a wanted stage cannot start."""
    check_dependencies(asked.wanted, as_done(states, *IN_FLIGHT))  # those in the queue count
    check_stopped(asked.run, asked.wanted, states)
    return submitting.submissions(asked.run, asked.cluster, asked.wanted, states)


def _check_queued_settings(run: Run) -> None:
    """Raise UserError where queued jobs would run with settings they were not submitted with."""
    if not run.settings_file.exists():
        return
    if differing_keys(load_started(run.settings_file), run.settings) and queue_of(run)[0]:
        raise UserError(
            f"{shown(run.path)} has jobs in the queue, which would run with these different "
            f"settings; cancel them first with: braid cancel {shown(run.path)}"
        )


def _check_queued_profile(
    run: RunDirectory, cluster: ClusterSettings, queued: Sequence[Stage]
) -> None:
    """Raise UserError where jobs in the queue would read a changed cluster profile."""
    if not queued or not run.cluster.exists():
        return
    theirs = load_cluster(run.cluster)
    differing = {
        key
        for stage in queued
        for key in READ_BY_JOBS
        if getattr(theirs.of_kind(stage.kind), key) != getattr(cluster.of_kind(stage.kind), key)
    }
    if differing:
        raise UserError(
            f"{shown(run.path)} has jobs in the queue, which were submitted with a different "
            f"{', '.join(sorted(differing))}; cancel them first with: braid cancel "
            f"{shown(run.path)}"
        )
