"""The command that explains a stage's state: `braid why`."""

from __future__ import annotations

from argparse import Namespace

from pipeline.commands.support.arguments import JSON, RUN, STAGE, print_json
from pipeline.commands.support.registry import command
from pipeline.commands.support.runs import load_run
from pipeline.report import explain
from pipeline.slurm.queue import states_now
from pipeline.text import say, visible


@command(
    "why",
    "explain a stage's state: its inputs, its versions and its history",
    "  braid why quickstart merge\n\n"
    'JSON: {"stage", "state", "cause", "attempts", "step", "job", "checkpoint", "inputs",\n'
    '"after", "code", "versions", "events"}.',
    RUN,
    STAGE,
    JSON,
    place=50,
)
def why(arguments: Namespace) -> None:
    """Explain the state of a stage."""
    run = load_run(arguments)
    if arguments.json:
        [stage] = run.chosen([arguments.stage])
        print_json(arguments, explain.why_json(run, stage, states_now(run)))
    else:
        say(*map(visible, explain.why(run, arguments.stage)))
