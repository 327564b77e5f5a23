"""The command on a gate that has stopped a run: `braid gate override`."""

from __future__ import annotations

from argparse import Namespace

from pipeline.commands.support.arguments import RUN, TRUST
from pipeline.commands.support.registry import Argument, command, group
from pipeline.commands.support.runs import load_trusted_run
from pipeline.run import gates
from pipeline.text import say

GATE_HELP = """\
  braid gate override quickstart gates.experts.spell_backward --reason "noise: 3 of 500 problems"

`gate` in a block of stages adds the stage gates.STAGE; the quickstart has none.

The ledger keeps the reason, and `braid status` and `braid why` show it. The stages that wait for
the gate start with the next `braid resume`. Only a gate that has stopped can be overridden.
"""
group("gate", "override a gate that has stopped a run", GATE_HELP, place=180)


@command(
    "gate override",
    "let the stages that wait for a stopped gate start, and record why",
    GATE_HELP,
    RUN,
    TRUST,
    Argument("stage", metavar="STAGE", help="the gate, e.g. gates.experts.math"),
    Argument("--reason", required=True, help="why, in a sentence, for the ledger"),
)
def gate_override(arguments: Namespace) -> None:
    """Override a gate that has stopped."""
    run = load_trusted_run(arguments)
    # Shared: jobs of stages that do not wait for this gate may be running.
    with run.lock(shared=True):
        gates.override(run, arguments.stage, arguments.reason)
    say(f"{arguments.stage} is overridden; continue with: {run.resume_command()}")
