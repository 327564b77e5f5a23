"""The command that shows how two runs differ: `braid diff`."""

from __future__ import annotations

from argparse import Namespace

from pipeline.commands.support.arguments import JSON, RUN, print_json
from pipeline.commands.support.registry import Argument, command
from pipeline.commands.support.runs import find, load_run, read_run
from pipeline.report.compare.difference import difference, difference_lines
from pipeline.text import say, visible


@command(
    "diff",
    "show what differs between two runs: settings, data, parents, code, versions",
    "  braid diff quickstart longer       a second run: docs/tutorial.md creates it\n\n"
    'JSON: {"settings": {KEY: [RUN, OTHER_RUN]}, "stages": {STAGE: {FIELD: [RUN, OTHER_RUN]}}}.',
    RUN,
    Argument("other", metavar="OTHER_RUN", help="the other run's name or directory"),
    JSON,
    place=60,
)
def diff(arguments: Namespace) -> None:
    """Show how two runs differ."""
    run = load_run(arguments)
    other = read_run(find(arguments.runs_dir, arguments.other))
    differing = difference(run, other)
    if arguments.json:
        print_json(arguments, differing)
    else:
        lines = difference_lines(differing)
        say(*map(visible, lines or ["no difference"]))
