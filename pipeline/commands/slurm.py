"""What `braid submit`, `stage` and `cancel` do."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from parallel.files import write_atomically
from pipeline.commands import runs as commands
from pipeline.config.cluster import READ_BY_JOBS, ClusterSettings
from pipeline.config.validate import differing_keys, load_cluster
from pipeline.config.violations import shown
from pipeline.errors import BraidError
from pipeline.report.terminal import terminal
from pipeline.run import resolved
from pipeline.run.directory import RunDirectory
from pipeline.run.fork import find_fork
from pipeline.run.gates import refuse_stopped
from pipeline.run.graph import Stage, compile_graph
from pipeline.run.ledger import Ledger, State, latest
from pipeline.run.other_settings import refuse_other_configuration
from pipeline.run.selection import as_done, as_found, chosen, following, refuse_missing_inputs
from pipeline.run.stale import refuse_stale
from pipeline.run.states import StageState, derive
from pipeline.run.trust import check_owner, warn_of_readers
from pipeline.slurm import queue
from pipeline.slurm import submit as submitting
from pipeline.slurm.jobs import adopt, job_numbers, queue_of
from pipeline.slurm.queue import QueuedJob
from pipeline.slurm.stage import run_stage
from pipeline.text import say
from stages.settings import RunSettings

UNDER_WAY: tuple[State, ...] = ("submitted", "running")


@dataclass(frozen=True)
class _Submission:
    """What `braid submit` was asked for: `wanted` stages, of them and of all others those made
    `anew` by name, and what is `taken` over from the `other` run, by stage."""

    run: RunDirectory
    settings: RunSettings
    profile: Path
    cluster: ClusterSettings
    stages: Sequence[Stage]
    wanted: list[Stage]
    anew: list[str]
    other: RunDirectory | None
    taken: Mapping[str, str]

    def to_put_aside(self) -> list[Stage]:
        """Those made anew, and all that follows them."""
        return following(self.stages, self.anew)

    def states(self, queued: Mapping[str, QueuedJob] | None = None) -> dict[str, StageState]:
        """Where every stage stands; what is in the queue where `queued` says it."""
        return derive(self.run, self.settings, self.stages, queued)

    def states_to_be(self, now: Mapping[str, StageState]) -> dict[str, StageState]:
        """Where every stage will stand once what was asked for is put aside and taken over."""
        return as_found(self.stages, now, self.taken, self.anew)


def submit(arguments: Namespace) -> None:
    """Hand every stage that is not done to Slurm."""
    asked = _asked(arguments)
    run = asked.run
    if arguments.dry_run:
        _preview(asked)
        return
    warn_of_readers(run)
    if not run.settings.exists():  # then nothing is made for what cannot start
        _refuse_missing(asked.wanted, asked.states_to_be(asked.states()))
    with run.lock(shared=True), run.lock_submission() as lock:
        states = _settled(asked)
        jobs = _submissions(asked, states)
        if jobs:
            submitting.write_scripts(run, asked.cluster, jobs)
        if arguments.prepare:
            write_atomically(run.submitting, "")
            say(f"nothing is submitted; the commands stand in {shown(run.submission)}")
            return
        for stage, number in submitting.submit(run, jobs, asked.cluster, asked.profile, lock):
            with suppress(BrokenPipeError):  # nobody reads on, and the others are submitted too
                say(f"{stage.name}: job {number}", flush=True)
    for stage in asked.wanted:
        state = states[stage.name]
        if state.state in ("done", *UNDER_WAY):
            say(f"{stage.name}: {state.state} already{_in_words(state)}")
    here = shown(run.path)
    say(f"see where it stands with: braid status {here}; and what a stage prints with:")
    say(f"braid logs {here} STAGE -f")


def stage(arguments: Namespace) -> None:
    """Run one stage here, as the stage scripts do."""
    run, settings = commands.owned(arguments, to_start=True)
    [wanted] = chosen(run, compile_graph(settings), [arguments.stage])
    with run.lock(shared=True):
        run_stage(run, settings, wanted, terminal(), commands.PROGRAMS)


def cancel(arguments: Namespace) -> None:
    """Take a run's jobs out of the queue; those that run save first."""
    run, settings = commands.existing(arguments)
    stages = compile_graph(settings)
    names = {stage.name for stage in chosen(run, stages, arguments.stages)}
    with run.lock_submission():
        queued = _jobs(run)
        newest = latest(Ledger(run.ledger).events())
        done = {name for name, event in newest.items() if event.state == "done"}
        names &= {name for name, _ in queued}
        for stage in stages:  # those before it come first
            # Slurm lets what waits for a cancelled task of an array start all the same.
            if names & {*stage.waits_for}:
                names.add(stage.name)
        jobs = [(name, job) for name, job in queued if name in names]
        if not jobs:
            say(f"{shown(run.path)} has no job in the queue")
        # Those that wait first, so that none begins because another one ends.
        for name, job in sorted(jobs, key=lambda item: not item[1].waits):
            if job.waits or arguments.now:
                queue.call(["scancel", job.number])
            else:
                queue.call(["scancel", "--batch", "--signal=TERM", job.number])
            if job.waits and name not in done:
                Ledger(run.ledger).append(name, "pending", "cancelled", run.stage(name).attempts())
            running = "ends at once" if arguments.now else "saves and ends"
            say(f"{name}: {'cancelled' if job.waits else running} (job {job.number})")


def _asked(arguments: Namespace) -> _Submission:
    """Raises BraidError where the arguments, the profile or the run's path cannot be."""
    run, settings = commands.configured(arguments)
    check_owner(run, arguments.trust_run)
    profile = _profile(arguments.cluster, run)
    cluster = load_cluster(profile)
    for letter, name in (("%", "%"), ("\n", "line break")):
        if letter in str(run.path.absolute()):
            raise BraidError(
                f"{shown(run.path)}: Slurm reads a {name} in a path otherwise; choose another"
            )
    stages = compile_graph(settings)
    wanted = chosen(run, stages, arguments.only)
    chosen(run, stages, arguments.anew)
    other = commands.forked(arguments)
    taken = find_fork(run, settings, other).taken if other is not None else {}
    submitting.refuse_too_large_engines(settings, cluster, stages)
    return _Submission(
        run, settings, profile, cluster, stages, wanted, arguments.anew, other, taken
    )


def _preview(asked: _Submission) -> None:
    """Show what would be submitted, or raise BraidError as the submission would; writes nothing."""
    run, settings = asked.run, asked.settings
    _refuse_other_settings(run, settings)
    refuse_other_configuration(run, settings, asked.anew)
    again = asked.to_put_aside()
    refuse_stale(run, settings, [each for each in asked.wanted if each not in again], record=False)
    queued, unasked = queue_of(run, Ledger(run.ledger).events())
    jobs = _submissions(asked, asked.states_to_be(asked.states(queued)))
    _show(run, jobs, unasked)


def _settled(asked: _Submission) -> dict[str, StageState]:
    """Where every stage stands, once the run has these settings, and what was asked for is put
    aside and taken over. Raises BraidError where that cannot be; unless it is for what is stale,
    the run is then as it was."""
    run, settings = asked.run, asked.settings
    _refuse_other_settings(run, settings)
    queued = adopt(run)
    before = asked.states(queued)
    _refuse_under_way(run, before, asked.to_put_aside())
    under_way = {name for name, state in before.items() if state.job and state.state in UNDER_WAY}
    with_jobs = [each for each in asked.stages if each.name in under_way]
    _refuse_other_profile(run, asked.cluster, with_jobs)
    # What is stale is refused with a reason of its own.
    _refuse_missing(asked.wanted, as_done(asked.states_to_be(before), "stale"))
    commands.take_settings(run, settings, asked.anew)
    if asked.other is not None:
        commands.take_over_from(run, settings, asked.other)
    commands.make_anew(run, asked.to_put_aside())
    refuse_stale(run, settings, asked.wanted)
    return asked.states(queued)


def _refuse_under_way(
    run: RunDirectory, states: Mapping[str, StageState], anew: Sequence[Stage]
) -> None:
    """Raise BraidError where what is to be made anew waits in the queue or runs."""
    busy = [each.name for each in anew if states[each.name].state in UNDER_WAY]
    if busy:
        raise BraidError(
            f"{', '.join(busy)} cannot be made anew, since a job of it waits or runs; take it out "
            f"first with: braid cancel {shown(run.path)}"
        )


def _show(run: RunDirectory, jobs: Sequence[submitting.Submission], unasked: str) -> None:
    """What would be submitted, as a script; writes nothing."""
    say(submitting.script_of(jobs))
    say("# Nothing is written and nothing submitted. The stage scripts are these files. For their")
    say(f"# commands to run by hand, --prepare makes {shown(run.path)} and this script in it.")
    if unasked:
        say(f"# {unasked}")


def _submissions(
    asked: _Submission, states: Mapping[str, StageState]
) -> list[submitting.Submission]:
    """Raises BraidError where something that is wanted cannot start."""
    _refuse_missing(asked.wanted, states)
    refuse_stopped(asked.run, asked.wanted, states)
    return submitting.submissions(asked.run, asked.settings, asked.cluster, asked.wanted, states)


def _jobs(run: RunDirectory) -> list[tuple[str, QueuedJob]]:
    """The stage and the job of everything in the queue; two where a stage was submitted twice."""
    jobs = adopt(run)
    stages = {number: name for name, number in job_numbers(Ledger(run.ledger).events()).items()}
    named = ((job.stage or stages.get(number), job) for number, job in jobs.items())
    return [(name, job) for name, job in named if name is not None]


def _refuse_missing(wanted: list[Stage], states: Mapping[str, StageState]) -> None:
    """What is in the queue may be waited for."""
    refuse_missing_inputs(wanted, as_done(states, *UNDER_WAY))


def _refuse_other_settings(run: RunDirectory, settings: RunSettings) -> None:
    """Raise BraidError where jobs wait that would run with other settings than they were submitted
    with."""
    if run.settings.exists() and differing_keys(resolved.read(run), settings):
        jobs, _ = queue_of(run, Ledger(run.ledger).events())
        if jobs:
            raise BraidError(
                f"{shown(run.path)} has jobs in the queue, which would run with these other "
                f"settings; take them out first with: braid cancel {shown(run.path)}"
            )


def _refuse_other_profile(
    run: RunDirectory, cluster: ClusterSettings, queued: Sequence[Stage]
) -> None:
    """Raise BraidError where jobs wait or run that would read another profile than they were
    submitted with."""
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
        raise BraidError(
            f"{shown(run.path)} has jobs in the queue, which would read another "
            f"{', '.join(sorted(differing))} than they were submitted with; take them out first "
            f"with: braid cancel {shown(run.path)}"
        )


def _profile(path: Path | None, run: RunDirectory) -> Path:
    """The file of the cluster's profile: one that is given, or what the run has of its last."""
    if path is not None:
        return path
    if run.cluster.exists():
        return run.cluster
    raise BraidError("--cluster FILE is needed: configs/clusters has one to begin with")


def _in_words(state: StageState) -> str:
    return f" ({state.cause})" if state.state != "done" and state.cause else ""
