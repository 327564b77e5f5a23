"""The command that runs one stage, as the stage scripts do: `braid stage`."""

from __future__ import annotations

from argparse import Namespace

from parallel.errors import UserError
from pipeline.commands.support import starting
from pipeline.commands.support.arguments import RUN, TRUST
from pipeline.commands.support.registry import Argument, command
from pipeline.commands.support.runs import find, load_run_to_start
from pipeline.report import status as report
from pipeline.slurm.stage import run_stage, stage_of_task
from pipeline.tables import terminal


@command(
    "stage",
    "run one stage of a run, as the stage scripts in slurm/ do",
    "  braid stage runs/quickstart experts.chain_sum\n\n"
    "In a Slurm job, ranks and engines are steps of it; elsewhere they run here. `braid run` or\n"
    "`braid submit --prepare` writes the run's directory first.",
    RUN,
    TRUST,
    Argument(
        "stages", metavar="STAGE", nargs="+", help="its name; several in a job array, one a task"
    ),
    place=230,
)
def stage(arguments: Namespace) -> None:
    """Run one stage here, as the stage scripts do; of several, the one of this array task."""
    name = stage_of_task(arguments.stages)
    # Looked for by itself, since only its absence is fixed by the command of the note.
    try:
        find(arguments.runs_dir, arguments.run)
    except UserError as error:
        error.add_note("create a run with: braid submit CONFIG --cluster PROFILE --prepare")
        raise
    run = load_run_to_start(arguments, [name])
    [selected] = run.chosen([name])
    with run.lock(shared=True):
        results = run_stage(run, selected, terminal(), starting.PROGRAMS)
    if results is not None:
        print(report.results_table(results, own_domains=run.own_domains))
