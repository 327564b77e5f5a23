"""The command that cancels a run's Slurm jobs: `braid cancel`."""

from __future__ import annotations

from argparse import Namespace

from pipeline.commands.support.arguments import RUN, TRUST
from pipeline.commands.support.registry import Argument, command
from pipeline.commands.support.runs import load_trusted_run
from pipeline.run.ledger import latest
from pipeline.slurm import queue
from pipeline.slurm.queue import adopt, job_numbers
from pipeline.text import say, shown


@command(
    "cancel",
    "cancel a run's Slurm jobs; running stages checkpoint first",
    "  braid cancel quickstart\n  braid cancel quickstart experts.chain_sum",
    RUN,
    TRUST,
    Argument("stages", metavar="STAGE", nargs="*", help="only these stages (default: all)"),
    Argument("--now", action="store_true", help="end running stages without a checkpoint"),
    place=240,
)
def cancel(arguments: Namespace) -> None:
    """Cancel a run's jobs; running stages checkpoint first."""
    run = load_trusted_run(arguments)
    names = {stage.name for stage in run.chosen(arguments.stages)}
    # No `braid submit` may add jobs between the look at the queue and scancel.
    with run.lock_submission():
        jobs = adopt(run)
        stages = {number: name for name, number in job_numbers(run.events).items()}
        stage_jobs = ((job.stage or stages.get(number), job) for number, job in jobs.items())
        queued = [(name, job) for name, job in stage_jobs if name is not None]
        newest = latest(run.events)
        done = {name for name, event in newest.items() if event.state == "done"}
        names &= {name for name, _ in queued}
        for stage in run.stages:  # dependencies come first
            # Slurm starts jobs that wait for a cancelled task of an array nevertheless.
            if names & {*stage.waits_for}:
                names.add(stage.name)
        to_cancel = [(name, job) for name, job in queued if name in names]
        if not to_cancel:
            say(f"{shown(run.path)} has no job in the queue")
        # Waiting jobs first, so that none starts because another one ends.
        for name, job in sorted(to_cancel, key=lambda item: not item[1].waits):
            # To the batch script alone: it is the launcher, which checkpoints. A plain scancel
            # signals the ranks as well, and kills all after KillWait, 30 s unless configured.
            gently = [] if job.waits or arguments.now else ["--batch", "--signal=TERM"]
            queue.call(["scancel", *gently, job.number])
            if job.waits and name not in done:
                run.ledger.append(name, "pending", "cancelled", run.stage(name).attempts())
            running = "ends now" if arguments.now else "checkpoints and ends"
            say(f"{name}: {'cancelled' if job.waits else running} (job {job.number})")
