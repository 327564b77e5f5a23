"""The command that writes a model for other programs: `braid export`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from pipeline.commands.support import starting
from pipeline.commands.support.arguments import RUN, STEP, TRUST
from pipeline.commands.support.registry import Argument, command
from pipeline.commands.support.runs import load_trusted_run
from pipeline.launch import one_off
from pipeline.slurm.queue import check_not_queued
from pipeline.tables import terminal
from pipeline.text import say, shown


@command(
    "export",
    "write a finished stage's model as a Hugging Face checkpoint",
    "  braid export quickstart --stage experts.chain_sum --to /tmp/chain_sum\n"
    "  braid export quickstart --stage experts.chain_sum --step 40 --to /tmp/at_its_best\n\n"
    "loop.keep_last and loop.keep_best decide which steps have a checkpoint.",
    RUN,
    TRUST,
    STEP,
    Argument("--stage", required=True, help="the stage whose model to write, e.g. merge"),
    Argument("--to", required=True, type=Path, help="a directory that is new or empty"),
    place=160,
)
def export(arguments: Namespace) -> None:
    """Write a finished stage's model for transformers and vLLM."""
    run = load_trusted_run(arguments)
    with run.lock():
        check_not_queued(run)
        one_off.export(
            run, terminal(), starting.PROGRAMS, arguments.stage, arguments.to, arguments.step
        )
    which = "" if arguments.step is None else f" of step {arguments.step}"
    say(f"exported {arguments.stage}{which} to {shown(arguments.to)}")
