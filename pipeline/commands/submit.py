"""The command that submits stages to Slurm: `braid submit`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from parallel.errors import UserError, hint
from parallel.files import write_atomically
from pipeline.commands.support.arguments import CONFIG_HELP, JSON, STARTING, print_json
from pipeline.commands.support.configuration import forked, load_configured_run, warn_of_graph
from pipeline.commands.support.registry import Argument, command
from pipeline.commands.support.starting import rerun, reuse_from
from pipeline.config.cluster import READ_BY_JOBS, ClusterSettings
from pipeline.config.validate import differing_keys, load_cluster, load_started
from pipeline.estimate.capacity import check_capacity
from pipeline.estimate.stage_memory import gpus_of, unchecked
from pipeline.report.status import summary
from pipeline.run.directory import RunDirectory, check_owner, warn_of_readers
from pipeline.run.edits import moved_lines
from pipeline.run.former import move_renamed
from pipeline.run.gates import check_stopped
from pipeline.run.graph import Stage
from pipeline.run.ledger import State
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
from pipeline.slurm.queue import SlurmError, adopt, queue_of
from pipeline.text import say, shown, warn

IN_FLIGHT: tuple[State, ...] = ("submitted", "running")


@dataclass(frozen=True)
class _Submission:
    """A request of `braid submit`, with the names to `rerun` and to be `reused` from `other`."""

    run: Run
    profile: Path
    cluster: ClusterSettings
    selected: list[Stage]
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
    place=220,
)
def submit(arguments: Namespace) -> None:
    """Submit every unfinished stage to Slurm."""
    submission = _submission_of(arguments)
    run = submission.run
    if arguments.dry_run:
        _preview(submission, arguments)
        return
    warn_of_readers(run)
    if not run.settings_file.exists():  # checked early, so that no directory is created in vain
        check_dependencies(submission.selected, as_done(submission.planned(run.states), *IN_FLIGHT))
        queue.check_answers(run)
    # Shared with the jobs of earlier submissions; the second lock keeps two submissions apart.
    with run.lock(shared=True), run.lock_submission() as lock:
        states = _settled(submission)
        jobs = _submissions(submission, states)
        if jobs or arguments.prepare:
            submitting.write_scripts(run, submission.cluster, submission.profile, jobs)
        if arguments.prepare:
            write_atomically(run.submitting, "")
            say(f"nothing is submitted; the commands are in {shown(run.submission)}")
            if arguments.json:
                print_json(arguments, {"run": str(run.path), "script": str(run.submission)})
            return
        numbers = {}
        try:
            for stage, number in submitting.submit(
                run, jobs, submission.cluster, submission.profile, lock
            ):
                numbers[stage.name] = number
                with suppress(BrokenPipeError):  # a closed pipe must not stop the other submissions
                    say(f"{stage.name}: job {number}", flush=True)
        except SlurmError as error:
            only = "".join(f" --only {name}" for name in arguments.only)
            error.add_note(f"once that is fixed, continue with: {run.resume_command()}{only}")
            raise
    for stage in submission.selected:
        state = states[stage.name]
        if state.state in ("done", *IN_FLIGHT):
            why = f" ({state.cause})" if state.state != "done" and state.cause else ""
            say(f"{stage.name}: {state.state} already{why}")
    here = shown(run.path)
    say(f"watch it with: braid status {here}; and the output of a stage with:")
    say(f"braid logs {here} STAGE -f")
    if arguments.json:
        print_json(arguments, {"run": str(run.path), "jobs": numbers})


def _submission_of(arguments: Namespace) -> _Submission:
    """Return the request; raise UserError where the arguments, profile or path are invalid."""
    run = load_configured_run(arguments)
    warn_of_graph(arguments, run.settings)
    check_owner(run, arguments.trust_run)
    profile = arguments.cluster or run.cluster
    if arguments.cluster is None and not run.cluster.exists():
        raise UserError(
            "--cluster FILE is required; cp configs/clusters/example.yaml "
            "configs/clusters/mine.yaml and fill it in"
        )
    if not profile.exists():
        profiles = [shown(path) for path in sorted(Path("configs/clusters").glob("*.yaml"))]
        suggestion = f"; {hint(str(profile), profiles)}" if profiles else ""
        raise UserError(f"--cluster {shown(profile)}: no such file{suggestion}")
    cluster = load_cluster(profile)
    for letter, name in (("%", "%"), ("\n", "line break")):
        if letter in str(run.path.absolute()):
            raise UserError(
                f"{shown(run.path)}: Slurm misreads a {name} in a path; choose another path"
            )
    selected = run.chosen(arguments.only)
    run.chosen(arguments.rerun)
    other, fork = forked(arguments, run)
    submitting.check_engines(run.settings, cluster, run.stages)
    submission = _Submission(run, profile, cluster, selected, arguments.rerun, other, fork.reused)
    left = unfinished(selected, submission.planned(run.states))
    check_capacity(run.settings, left, gpus_of(cluster))
    warn(unchecked(cluster, profile, left))
    return submission


def _preview(submission: _Submission, arguments: Namespace) -> None:
    """Show the submission, or raise the error that it would raise; write nothing."""
    run = submission.run
    _check_queued_settings(run)
    check_settings(run, submission.rerun, moved_lines)
    again = run.downstream(submission.rerun)
    check_stale(run, [stage for stage in submission.selected if stage not in again], record=False)
    queued, unasked = queue_of(run)
    planned = submission.planned(run.states_with(queued))
    jobs = _submissions(submission, planned)
    nothing = "" if jobs else f"nothing to submit: {summary(planned)}"
    if arguments.json:
        commands = [
            {"stages": [stage.name for stage in job.stages], "command": command}
            for job, command in zip(jobs, submitting.shell_commands(jobs), strict=True)
        ]
        note = nothing or unasked
        print_json(arguments, {"run": str(run.path), "commands": commands, "note": note})
        return
    if nothing:
        say(f"# {nothing}; rerun a stage and what follows with --from STAGE")
    else:
        say(submitting.script_of(jobs))
        say("# Nothing is written and nothing submitted. To run these commands by hand, --prepare")
        say(f"# writes {shown(run.path)} with this script in it.")
    if unasked:
        say(f"# {unasked}")


def _settled(submission: _Submission) -> dict[str, StageState]:
    """Write the run's settings, put aside and reuse stages; return every stage's state then.

    Raises:
        UserError: the request cannot be met; unless the reason is a stale stage, the run has not
            changed.
    """
    run = submission.run
    _check_queued_settings(run)
    queued = adopt(run)
    before = run.states_with(queued)
    again = [stage.name for stage in run.downstream(submission.rerun)]
    if busy := [name for name in again if before[name].state in IN_FLIGHT]:
        raise UserError(
            f"{', '.join(busy)} cannot be rerun while a job of it waits or runs; cancel it first "
            f"with: braid cancel {shown(run.path)}"
        )
    in_flight = {name for name, state in before.items() if state.job and state.state in IN_FLIGHT}
    with_jobs = [stage for stage in run.stages if stage.name in in_flight]
    _check_queued_profile(run, submission.cluster, with_jobs)
    # `check_stale` refuses stale stages.
    check_dependencies(
        submission.selected, as_done(submission.planned(before), "stale", *IN_FLIGHT)
    )
    check_settings(run, submission.rerun, moved_lines)
    run.write_settings()
    move_renamed(run)
    if submission.other is not None:
        reuse_from(run, submission.other)
    rerun(run, submission.rerun)
    check_stale(run, submission.selected)
    return run.states_with(queued)


def _submissions(
    submission: _Submission, states: Mapping[str, StageState]
) -> list[submitting.Submission]:
    """Return the jobs; raise UserError where a wanted stage cannot start."""
    check_dependencies(submission.selected, as_done(states, *IN_FLIGHT))  # those in the queue count
    check_stopped(submission.run, submission.selected, states)
    return submitting.submissions(submission.run, submission.cluster, submission.selected, states)


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
