"""The command that shows what a stage prints: `braid logs`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from pipeline.commands.support.arguments import RUN, STAGE
from pipeline.commands.support.registry import Argument, command
from pipeline.commands.support.runs import load_run
from pipeline.report import explain
from pipeline.run.graph import Stage
from pipeline.run.run import Run
from pipeline.slurm.queue import is_queued, states_now
from stages.directory import EngineDirectory


@command(
    "logs",
    "show what a stage prints",
    "  braid logs quickstart experts.chain_sum -f           the output of its job\n"
    "  braid logs quickstart experts.chain_sum --rank 1\n"
    "  braid logs quickstart experts.chain_sum --engine 0",
    RUN,
    STAGE,
    Argument("-f", "--follow", action="store_true", help="keep printing while the stage runs"),
    Argument(
        "--rank",
        type=int,
        metavar="N",
        help="the log of a rank (default: the output of its Slurm job; without one, rank 0)",
    ),
    Argument(
        "--engine",
        metavar="N",
        help="the log of an engine instead of a rank; N.M is that of its member M (engine.data)",
    ),
    place=70,
)
def logs(arguments: Namespace) -> None:
    """Show what a stage prints."""
    run = load_run(arguments)
    [stage] = run.chosen([arguments.stage])
    of_job = arguments.rank is None and arguments.engine is None

    def is_running() -> bool:
        if states_now(run.refresh())[stage.name].state in ("running", "submitted"):
            return True
        # The job prints its last lines after its stage is recorded as done.
        return of_job and (job := _newest_job(run, stage)) is not None and is_queued(run, job)

    def output() -> Path | None:
        """Return the output of the newest job; None where it has none here."""
        job = _newest_job(run.refresh(), stage) if of_job else None
        return run.output_of(job) if job is not None else None

    directory = run.stage(stage.name)
    follow = is_running if arguments.follow else None
    if arguments.engine is not None:
        stage_log = EngineDirectory(directory.engines / arguments.engine).log
        log = stage_log if stage_log.exists() else run.engine(arguments.engine).log
        explain.print_growing(lambda: log, follow)
    else:
        explain.print_log(directory, f"rank_{arguments.rank or 0}.log", follow, output)


def _newest_job(run: Run, stage: Stage) -> str | None:
    """Return the number of the newest job that a stage had, by the ledger."""
    events = [event for event in run.events if event.stage == stage.name]
    return next((event.job for event in reversed(events) if event.job is not None), None)
