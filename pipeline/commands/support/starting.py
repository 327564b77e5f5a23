"""The start of a run's stages, as `run`, `resume` and `submit` share it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection

from pipeline.commands.support.arguments import print_json
from pipeline.launch.launcher import JobFailed
from pipeline.launch.placement import Programs
from pipeline.launch.processes import Stopped
from pipeline.launch.runner import run_stages
from pipeline.report import status as report
from pipeline.report.view.next_commands import next_three, serve_command
from pipeline.run.directory import TRUST_OPTION, RunDirectory
from pipeline.run.gates import GateStopped
from pipeline.run.metrics import Models
from pipeline.run.run import Run
from pipeline.run.select import (
    find_fork,
    put_aside,
    reuse_stages,
)
from pipeline.tables import table, terminal
from pipeline.text import say, shown

# Read through this module wherever ranks or engines start, so that tests can replace it.
PROGRAMS = Programs()


def reuse_from(run: Run, other: RunDirectory) -> None:
    """Reuse the identical stages of another run, and say which."""
    fork = find_fork(run, other)
    reuse_stages(run, other, fork)
    none = "no stage: none is finished there with identical settings, data and inputs"
    say(f"reused from {shown(other.path)}: {', '.join(fork.reused) or none}")
    for name, gate in fork.held.items():
        say(f"not reused: {name}, since it waits for {gate}, which has to run first")
    for name, change in fork.differing.items():
        say(f"not reused: {name}: {change}")


def rerun(run: Run, names: list[str]) -> None:
    """Put the output of the named stages and everything downstream aside, and say where."""
    for directory in put_aside(run, run.downstream(names) if names else []):
        say(f"put aside {shown(directory)}")


def start_stages(run: Run, arguments: Namespace) -> None:
    """Run the stages on this machine, then write and show the results.

    Raises:
        JobFailed, GateStopped, Stopped: with a note on how to continue, after the results so far.
    """
    console = terminal()
    rerun(run, arguments.rerun)
    try:
        run_stages(run, console, PROGRAMS, arguments.only, arguments.parallel)
    except (JobFailed, GateStopped, Stopped) as error:
        if not isinstance(error, GateStopped):  # which names its own ways to continue
            resume = _resume_command(run, arguments)
            error.add_note(f"finished stages are kept; continue with: {resume}")
        # A failed stage blocks only its dependents, so that an evaluation of others may be done.
        models = _written_results(run, arguments.only)
        if models is not None and not arguments.json:
            _show_results(run, models)
        raise
    models = _written_results(run, arguments.only)
    if arguments.json:
        print_json(arguments, report.run_state(run, run.states))
        return
    if models is None:
        say(f"{shown(run.path)}: {report.summary(run.states)}")
    else:
        _show_results(run, models)
    _show_end(run, measured=models is not None and len(models) > 1)


def _written_results(run: Run, only: Collection[str]) -> Models | None:
    """Write results.json where an evaluation of the chosen stages is done; return its models."""
    states = run.refresh().states
    done = (stage for stage in run.chosen(only) if states[stage.name].state == "done")
    return run.write_results() if any(stage.declared.evaluates for stage in done) else None


def _show_results(run: Run, models: Models) -> None:
    print("", report.results_table(models, own_domains=run.own_domains), sep="\n")
    say(f"\nresults: {shown(run.results)}")
    for stage in run.stages:
        exports = stage.declared.exports or stage.declared.exports_itself
        if exports and run.states[stage.name].state == "done":
            model = stage.parent if stage.declared.exports else stage.name
            directory = run.stage(stage.name).exported
            say(f"model of {model}: {shown(directory)}", f"  {serve_command(directory)}")


def _show_end(run: Run, measured: bool) -> None:
    """Print the verdict on each stage that trained, and what to run next."""
    # Commands that start nothing, such as --dry-run, need none of these.
    from pipeline.report.compare.comparison import held_out_gains
    from pipeline.report.view.health import judged
    from pipeline.report.view.overview import Overview, health_lines

    overview = Overview.of(run)
    gains = held_out_gains(run, overview.states)
    health = judged(run, overview.states, overview.lines, gains)
    if health.verdicts:
        print("", table("", (), [[line] for line in health_lines(health)]), "", sep="\n")
    say("next:", *(f"  {line}" for line in next_three(run, health, measured)))


def _resume_command(run: Run, arguments: Namespace) -> str:
    """Return the command that resumes the run with the options of this one."""
    only = [f"--only {name}" for name in arguments.only]
    parallel = [f"--parallel {arguments.parallel}"] if arguments.parallel > 1 else []
    trust = [TRUST_OPTION] if arguments.trust_run else []
    return " ".join(["braid resume", shown(run.path), *only, *parallel, *trust])
