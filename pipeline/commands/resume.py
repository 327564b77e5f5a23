"""The command that resumes a run: `braid resume`."""

from __future__ import annotations

from argparse import Namespace

from pipeline.commands.support.arguments import JSON, PARALLEL, RUN, SELECTION, TRUST
from pipeline.commands.support.configuration import check_machine
from pipeline.commands.support.registry import command
from pipeline.commands.support.runs import load_run_to_start
from pipeline.commands.support.starting import start_stages
from pipeline.run.directory import warn_of_readers
from pipeline.run.former import move_renamed
from pipeline.run.select import MAY_CHANGE, check_selection
from pipeline.slurm.queue import check_not_queued


@command(
    "resume",
    "continue a run from the newest whole checkpoint of each unfinished stage",
    "  braid resume quickstart\n"
    "  braid resume /scratch/runs/quickstart\n\n"
    "To resume with other settings, `braid run` the configuration with them under the same name.\n"
    f"These may change, since they decide no result:\n{MAY_CHANGE}\n\n"
    "JSON, at the end: as `braid status RUN --json`.",
    *SELECTION,
    PARALLEL,
    RUN,
    TRUST,
    JSON,
    place=140,
)
def resume(arguments: Namespace) -> None:
    """Resume a run."""
    run = load_run_to_start(arguments, arguments.only, arguments.rerun)
    check_selection(run, arguments.only, arguments.rerun)
    check_machine(run, arguments)
    warn_of_readers(run)
    with run.lock():
        check_not_queued(run)
        move_renamed(run)
        start_stages(run, arguments)
