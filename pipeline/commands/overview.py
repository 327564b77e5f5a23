"""Where runs stand: `braid status`, which builds no settings class where it need not."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from pipeline.config.violations import hint, shown
from pipeline.errors import BraidError, reason
from pipeline.report import columns
from pipeline.report import tables as report
from pipeline.run import compiled
from pipeline.run.directory import RunDirectory
from pipeline.run.ledger import Ledger
from pipeline.run.results import read_models
from pipeline.run.states import states_of
from pipeline.slurm.jobs import queue_of
from pipeline.text import say


def status(arguments: Namespace) -> None:
    """Show where a run stands, or every run."""
    if arguments.run is not None:
        _show(find(arguments.runs_dir, arguments.run))
        return
    found = runs(arguments.runs_dir)
    if not found:
        say(f"no runs in {shown(arguments.runs_dir)}")
    for path in found:
        say(f"{path.name}: {_summary(RunDirectory(path))}")


def find(runs_dir: Path, name: str) -> RunDirectory:
    """The run of a name, or in a folder. Raises BraidError where there is none."""
    for path in (runs_dir / name, Path(name)):
        if (run := RunDirectory(path)).settings.exists():
            return run
    known = [path.name for path in runs(runs_dir)]
    raise BraidError(f"no run {name} in {shown(runs_dir)}; {hint(name, known)}")


def runs(runs_dir: Path) -> list[Path]:
    """The folders of all runs."""
    return sorted(settings.parent for settings in runs_dir.glob("*/run.yaml"))


def _show(run: RunDirectory) -> None:
    """Ledger and queue as one table; below it the run's results, where it has ended."""
    found, events = _compiled(run), Ledger(run.ledger).events()
    jobs, unasked = queue_of(run, events)
    states = states_of(run, found.stages, found.layout, events, jobs)
    print(report.status_table(run, found.stages, states, events, columns.takes_colour()))
    if unasked:
        say(unasked)
    if states["evaluate"].state == "done" and run.results.exists():
        _show_results(run)


def _show_results(run: RunDirectory) -> None:
    if (models := read_models(run.results)) is None:
        say(f"\n{shown(run.results)} is damaged; evaluate once more with --from evaluate")
        return
    # Imported here, since only a table of results needs it.
    from pipeline.report.terminal import terminal

    terminal().print("", report.results_table(models), sep="\n")


def _summary(run: RunDirectory) -> str:
    try:
        found, events = _compiled(run), Ledger(run.ledger).events()
        jobs, _ = queue_of(run, events)
        return report.summary(states_of(run, found.stages, found.layout, events, jobs))
    except (BraidError, OSError) as error:
        return reason(error).replace("\n", "\n  ")


def _compiled(run: RunDirectory) -> compiled.Compiled:
    """Raises ConfigError where run.yaml cannot be read."""
    if (found := compiled.read(run)) is not None:
        return found
    # Imported here, since building the settings classes takes longer than all of the rest.
    from pipeline.run.resolved import compile_anew

    return compile_anew(run)
