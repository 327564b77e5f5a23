"""The command that shows the state of runs: `braid status`."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from pathlib import Path
from typing import Any

from parallel.errors import UserError
from pipeline.commands.support.arguments import JSON, print_json
from pipeline.commands.support.registry import Argument, command
from pipeline.commands.support.runs import load_run, read_run, run_paths
from pipeline.report import status as report
from pipeline.run.directory import RunDirectory
from pipeline.run.run import Run
from pipeline.slurm.queue import queue_of, states_now
from pipeline.text import reason, say, shown, warn


@command(
    "status",
    "show the state of a run, or of all runs",
    "  braid status\n  braid status quickstart\n\n"
    'JSON: {"runs": {RUN: {STATE: COUNT} or {"error": TEXT}}}; of one run {"run", "running",\n'
    '"stages": [{"name", "kind", "needs", "steps", "state", "cause", "attempts", "step", "job",\n'
    '"minutes"}], "results": {MODEL: {DOMAIN: {"accuracy", "low", "high", "n"}}} or null}.',
    Argument("run", metavar="RUN", nargs="?", help="the run's name or directory"),
    JSON,
    place=40,
)
def status(arguments: Namespace) -> None:
    """Show the state of a run, or of every run."""
    if arguments.run is not None:
        _show_run(arguments, load_run(arguments))
        return
    counts = {path.name: _counts(path) for path in run_paths(arguments.runs_dir)}
    if arguments.json:
        print_json(arguments, {"runs": counts})
        return
    if not counts:
        say(f"no runs in {shown(arguments.runs_dir)}")
    for name, run_counts in counts.items():
        text = run_counts.get("error") or ", ".join(
            f"{n} {state}" for state, n in run_counts.items()
        )
        say(f"{name}: {text}".replace("\n", "\n  "))


def _show_run(arguments: Namespace, run: Run) -> None:
    jobs, unasked = queue_of(run)
    states = run.states_with(jobs)
    if arguments.json:
        print_json(arguments, report.run_state(run, states))
        return
    print(report.status_table(run, states))
    if unasked:
        warn([unasked])
    if report.evaluated(run, states):
        if (models := report.current_models(run, states)) is None:
            again = " ".join(
                f"--from {stage.name}" for stage in run.stages if stage.declared.evaluates
            )
            say(f"\n{shown(run.results)} is damaged; rerun the evaluation with {again}")
        else:
            print("", report.results_table(models, own_domains=run.own_domains), sep="\n")
    if not run.is_running() and report.can_continue(run.stages, states):
        say(f"continue with: {run.resume_command()}")


def _counts(path: Path) -> dict[str, Any]:
    """Return how many stages of a run are in each state, or its `error`."""
    try:
        return dict(
            Counter(state.state for state in states_now(read_run(RunDirectory(path))).values())
        )
    except (UserError, OSError) as error:
        return {"error": reason(error)}
