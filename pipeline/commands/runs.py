"""The command that shows several runs in one table: `braid runs`."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

from parallel.errors import UserError
from pipeline.commands.support.arguments import JSON, print_json
from pipeline.commands.support.registry import Argument, command
from pipeline.commands.support.runs import find, read_run, run_paths
from pipeline.report.view.run_list import ListedRun, list_run, run_table
from pipeline.run.directory import RunDirectory
from pipeline.text import reason, say, shown, visible, while_slow


@command(
    "runs",
    "show several runs in one table: dates, states, sizes, outcomes",
    "  braid runs\n"
    "  braid runs quickstart longer\n"
    "  braid runs --runs-dir /scratch/runs\n\n"
    "The outcome is of the merge, else of the last model that was measured: its accuracy, and\n"
    "its change against the start, as means over the domains, with the paired 95 % interval.\n\n"
    'JSON: {"runs": [{"name", "path", "begun", "changed", "states": {STATE: COUNT}, "bytes",\n'
    '"model", "accuracy", "change", "half_width", "domains", "error"}]}; null where there is none.',
    Argument("names", metavar="RUN", nargs="*", default=[], help="only these (default: all)"),
    JSON,
    place=45,
)
def runs(arguments: Namespace) -> None:
    """Show several runs, the one that changed last at the end."""
    paths = [find(arguments.runs_dir, name).path for name in dict.fromkeys(arguments.names)]
    paths = paths or run_paths(arguments.runs_dir)
    with while_slow(f"reading {len(paths)} runs"):
        listed = sorted(map(_list, paths), key=lambda run: (run.changed or "", run.name))
    if arguments.json:
        print_json(arguments, {"runs": [asdict(run) for run in listed]})
    elif not listed:
        say(f"no runs in {shown(arguments.runs_dir)}")
    else:
        print(run_table(listed))
        for run in listed:
            if run.error is not None:
                say(f"{visible(run.name)}: {run.error}")


def _list(path: Path) -> ListedRun:
    """Return a run's row; of one that cannot be read, why."""
    try:
        return list_run(read_run(RunDirectory(path)))
    except (UserError, OSError) as error:
        return ListedRun(path.name, str(path), error=reason(error))
