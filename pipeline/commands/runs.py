"""What each `braid` command does; a failure is a `BraidError`, or an `OSError` with its path."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from pipeline.commands.overview import find
from pipeline.config.policy_rules import policy_cautions
from pipeline.config.validate import dump_resolved, load
from pipeline.config.violations import shown
from pipeline.errors import BraidError
from pipeline.launch import one_off
from pipeline.launch.launcher import JobFailed, Programs
from pipeline.launch.runner import cores_side_by_side, run_stages
from pipeline.launch.signals import Signals, Stopped
from pipeline.report import audit as audits
from pipeline.report import columns, explain
from pipeline.report import tables as report
from pipeline.report.doctor import sections, table
from pipeline.report.dry_run import DryRun
from pipeline.report.estimate import estimate
from pipeline.report.logs import print_file, print_log
from pipeline.report.memory import largest_memory, memory_report
from pipeline.report.outlook import what_follows
from pipeline.report.probe import probe
from pipeline.report.terminal import terminal
from pipeline.run import gates, resolved
from pipeline.run.copies import refuse_another_run_s
from pipeline.run.directory import RunDirectory
from pipeline.run.fork import RunFork, find_fork, take_over
from pipeline.run.graph import Stage, compile_graph
from pipeline.run.ledger import Ledger, took
from pipeline.run.other_settings import refuse_other_configuration
from pipeline.run.results import write_results
from pipeline.run.selection import chosen, following, put_aside, refuse_selection
from pipeline.run.states import StageState, derive
from pipeline.run.trust import OPTION, check_owner, warn_of_readers
from pipeline.slurm.jobs import is_queued, queue_of, refuse_queued
from pipeline.text import say, visible
from stages.rewards.registry import cautions
from stages.settings import RunSettings

PROGRAMS = Programs()


def validate(arguments: Namespace) -> None:
    """Say whether the configuration can run."""
    settings = _load(arguments)
    if arguments.resolved:
        print(dump_resolved(settings), end="")
        return
    stages = compile_graph(settings)
    domains = ", ".join(settings.domains)
    say(f"{arguments.config} is valid: {len(stages)} stages, domains {domains}")
    for line in cautions({name: each.rewards for name, each in settings.domains.items()}):
        say(line)
    for line in policy_cautions(settings):
        say(line)


def plan(arguments: Namespace) -> None:
    """Show what would run, and what of it is done; or what memory it takes."""
    settings = _load(arguments)
    if arguments.memory:
        console = terminal()
        for part in memory_report(settings):
            console.print(part)
        return
    run = _run_of(arguments, settings)
    if arguments.dot:
        states = _now(run, settings, compile_graph(settings))
        say(*explain.dot(settings, states))
        return
    _show_plan(run, settings)


def doctor(arguments: Namespace) -> None:
    """Show what is installed, what is used of it here, and how to mend what is missing."""
    console = terminal()
    findings = probe(console)
    faults = 0
    for heading, rows in sections(findings, arguments.runs_dir):
        console.print(table(heading, rows))
        console.print()
        faults += sum(row.verdict == "fault" for row in rows)
    if faults:
        raise BraidError(f"{faults} of these (✗) keep stages from running here")
    say("everything that is needed to run here works")


def run(arguments: Namespace) -> None:
    """Run the configuration, or continue the run of it."""
    run, settings = configured(arguments)
    check_owner(run, arguments.trust_run)
    other = forked(arguments)
    found = find_fork(run, settings, other) if other is not None else RunFork()
    _refuse_options(run, settings, arguments, found.taken)
    if arguments.dry_run:
        _show_dry_run(run, settings, arguments, found.taken)
        return
    warn_of_readers(run)
    with run.lock():
        refuse_queued(run)
        take_settings(run, settings, arguments.anew)
        if other is not None:
            take_over_from(run, settings, other)
        _run_to_the_end(run, settings, arguments)


def resume(arguments: Namespace) -> None:
    """Continue a run from where it stands."""
    run, settings = owned(arguments, to_start=True)
    _refuse_options(run, settings, arguments)
    warn_of_readers(run)
    with run.lock():
        refuse_queued(run)
        resolved.write_for_programs(run, settings)  # another version of Braid may have written it
        _run_to_the_end(run, settings, arguments)


def logs(arguments: Namespace) -> None:
    """Show what a stage prints."""
    run, settings = existing(arguments)
    stages = compile_graph(settings)
    [stage] = chosen(run, stages, [arguments.stage])

    of_job = arguments.rank is None and arguments.engine is None

    def goes_on() -> bool:
        if _now(run, settings, stages)[stage.name].state in ("running", "submitted"):
            return True
        # The job prints its last lines after the ledger has its stage as done.
        return of_job and (job := _newest_job(run, stage)) is not None and is_queued(run, job)

    def output() -> Path | None:
        """Return what the newest job printed, its progress; None where it had none here."""
        job = _newest_job(run, stage) if of_job else None
        return run.output_of(job) if job is not None else None

    directory = run.stage(stage.name)
    follow = goes_on if arguments.follow else None
    if arguments.engine is not None:
        own = directory.engines / str(arguments.engine) / "engine.log"
        print_file(own if own.exists() else run.engine(arguments.engine).log, follow)
    else:
        print_log(directory, f"rank_{arguments.rank or 0}.log", follow, output)


def _newest_job(run: RunDirectory, stage: Stage) -> str | None:
    """Return the number of the newest job that a stage had, by the ledger."""
    events = [event for event in Ledger(run.ledger).events() if event.stage == stage.name]
    return next((event.job for event in reversed(events) if event.job is not None), None)


def why(arguments: Namespace) -> None:
    """Show why a stage stands where it stands."""
    run, settings = existing(arguments)
    say(*map(visible, explain.why(run, settings, arguments.stage)))


def diff(arguments: Namespace) -> None:
    """Show how two runs differ."""
    runs = [_named(arguments, name) for name in (arguments.run, arguments.other)]
    lines = list(explain.difference(*runs))
    say(*map(visible, lines or ["no difference"]))


def evaluate(arguments: Namespace) -> None:
    """Evaluate finished stages once more."""
    run, settings = owned(arguments)
    console = terminal(sys.stderr) if arguments.json else terminal()
    with run.lock():
        refuse_queued(run)
        models, path = one_off.evaluate(
            run,
            settings,
            console,
            PROGRAMS,
            arguments.stage,
            arguments.step,
            arguments.domain,
            {key: value for key in one_off.FLAGS if (value := getattr(arguments, key)) is not None},
        )
    if arguments.json:
        print(json.dumps({"models": models, "results": str(path)}, indent=2))
        return
    console.print(report.results_table(models, arguments.step))
    say(f"\nresults: {shown(path)}")


def export(arguments: Namespace) -> None:
    """Write a finished stage's model for transformers and vLLM."""
    run, settings = owned(arguments)
    with run.lock():
        refuse_queued(run)
        one_off.export(
            run, settings, terminal(), PROGRAMS, arguments.stage, arguments.to, arguments.step
        )
    which = "" if arguments.step is None else f" of step {arguments.step}"
    say(f"exported {arguments.stage}{which} to {shown(arguments.to)}")


def audit(arguments: Namespace) -> None:
    """Compute steps of a run again from its files, and compare."""
    run, settings = owned(arguments)
    console = terminal(sys.stderr) if arguments.json else terminal()
    with Signals() as signals:
        found = audits.audit(
            run, compile_graph(settings), arguments.stage, arguments.step, console, signals
        )
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        say(*audits.lines(found, columns.takes_colour()))
    if differing := audits.differing(found):
        raise BraidError("the audit finds something else than the run: " + "; ".join(differing))
    if all(each["refused"] for each in found):
        raise BraidError("nothing was audited")


def gate_override(arguments: Namespace) -> None:
    """Let the run go on although a gate has stopped it."""
    run, settings = existing(arguments)
    with run.lock(shared=True):
        gates.override(run, settings, arguments.stage, arguments.reason)
    say(f"{arguments.stage} is overridden; go on with: {run.to_go_on()}")


def configured(arguments: Namespace) -> tuple[RunDirectory, RunSettings]:
    """The run of a configuration, with its settings."""
    settings = _load(arguments, *arguments.implied)
    return _run_of(arguments, settings), settings


def take_settings(run: RunDirectory, settings: RunSettings, anew: Sequence[str] = ()) -> None:
    """Make these the run's settings. Raises BraidError where stages have work of other ones and
    are not to be made `anew`."""
    refuse_other_configuration(run, settings, anew)
    resolved.write(run, settings)


def _run_of(arguments: Namespace, settings: RunSettings) -> RunDirectory:
    """The run that a configuration names. Raises BraidError where it stands in another's folder."""
    run = RunDirectory(arguments.runs_dir / settings.name)
    if not arguments.name and not any(each.startswith("name=") for each in arguments.overrides):
        refuse_another_run_s(arguments.config, run)
    return run


def _load(arguments: Namespace, *implied: str) -> RunSettings:
    name = [f"name={json.dumps(arguments.name)}"] if arguments.name else []
    return load(arguments.config, [*arguments.overrides, *name, *implied])


def owned(arguments: Namespace, to_start: bool = False) -> tuple[RunDirectory, RunSettings]:
    """Return the run that the arguments name, to work on, with its settings. Raises BraidError
    where others may have written it and nobody asked to trust them."""
    check_owner(find(arguments.runs_dir, arguments.run), arguments.trust_run)
    return existing(arguments, to_start)


def existing(arguments: Namespace, to_start: bool = False) -> tuple[RunDirectory, RunSettings]:
    """The run that the arguments name, with its settings."""
    return _named(arguments, arguments.run, to_start)


def _named(
    arguments: Namespace, name: str, to_start: bool = False
) -> tuple[RunDirectory, RunSettings]:
    run = find(arguments.runs_dir, name)
    return run, resolved.read(run, to_start=to_start)


def _run_to_the_end(run: RunDirectory, settings: RunSettings, arguments: Namespace) -> None:
    console = terminal()
    stages = compile_graph(settings)
    if arguments.anew:
        make_anew(run, following(stages, arguments.anew))
    try:
        run_stages(run, settings, console, PROGRAMS, arguments.only, arguments.side_by_side)
    except (JobFailed, Stopped) as error:
        error.add_note(f"what is done is kept; continue with: {_to_go_on(run, arguments)}")
        raise
    if arguments.only:
        say(f"{shown(run.path)}: {report.summary(derive(run, settings, stages))}")
        return
    models = write_results(run)
    console.print()
    console.print(report.results_table(models))
    say(f"\nresults: {shown(run.results)}")
    if settings.merge is not None:
        say(f"merged model: {shown(run.stage('export').exported)}")


def _to_go_on(run: RunDirectory, arguments: Namespace) -> str:
    """The command that goes on with what this one was asked for."""
    only = [f"--only {name}" for name in arguments.only]
    count = arguments.side_by_side
    side_by_side = [f"--side-by-side {count}"] if count > 1 else []
    trust = [OPTION] if arguments.trust_run else []
    return " ".join(["braid resume", shown(run.path), *only, *side_by_side, *trust])


def forked(arguments: Namespace) -> RunDirectory | None:
    """Return the run that `--fork` names, if it was given. Raises BraidError where others may have
    written it and nobody asked to trust them."""
    if not arguments.fork:
        return None
    check_owner(find(arguments.runs_dir, arguments.fork), arguments.trust_run)
    return _named(arguments, arguments.fork)[0]


def make_anew(run: RunDirectory, stages: Iterable[Stage]) -> None:
    """Put aside what stages have left, and say so."""
    for folder in put_aside(run, stages):
        say(f"put aside {shown(folder)}")


def take_over_from(run: RunDirectory, settings: RunSettings, other: RunDirectory) -> None:
    """Take over from another run what this one would make alike, and say so."""
    found = find_fork(run, settings, other)
    take_over(run, other, found)
    none = "no stage, since none is done that this run would make so"
    say(f"took over from {shown(other.path)}: {', '.join(found.taken) or none}")
    for name, gate in found.held.items():
        say(f"left {name} there, since it waits for {gate}, which is to be asked first")


def _refuse_options(
    run: RunDirectory, settings: RunSettings, arguments: Namespace, taken: Collection[str] = ()
) -> None:
    """Raise BraidError where what the options ask for cannot be; nothing has been written yet."""
    refuse_selection(run, settings, arguments.only, arguments.anew, taken)
    cores_side_by_side(arguments.side_by_side)


def _now(
    run: RunDirectory, settings: RunSettings, stages: Sequence[Stage]
) -> dict[str, StageState]:
    """The stages' states by ledger and queue."""
    jobs, _ = queue_of(run, Ledger(run.ledger).events())
    return derive(run, settings, stages, jobs)


def _show_plan(run: RunDirectory, settings: RunSettings) -> None:
    stages = compile_graph(settings)
    states = _now(run, settings, stages)
    left = estimate(run, settings, stages, states, took(Ledger(run.ledger).events()))
    follows = what_follows(stages, states)
    print(report.plan_table(settings, stages, states, follows, left, columns.takes_colour()))
    say(f"{report.left_line(left)}; {largest_memory(settings, stages)}")


def _show_dry_run(
    run: RunDirectory, settings: RunSettings, arguments: Namespace, taken: Mapping[str, str]
) -> None:
    refuse_queued(run)
    refuse_other_configuration(run, settings, arguments.anew)
    stages = compile_graph(settings)
    states = _now(run, settings, stages)
    told = DryRun(run, settings, stages, states, taken, arguments.only, arguments.anew)
    print(told.plan(columns.takes_colour()))
    say("", *told.commands(PROGRAMS, arguments.side_by_side))
