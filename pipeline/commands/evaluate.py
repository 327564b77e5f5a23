"""The command that evaluates finished stages again: `braid evaluate`."""

from __future__ import annotations

from argparse import Namespace

from pipeline.commands.support import starting
from pipeline.commands.support.arguments import JSON, RUN, STEP, TRUST, positive, print_json
from pipeline.commands.support.registry import Argument, command
from pipeline.commands.support.runs import load_trusted_run
from pipeline.estimate.capacity import check_capacity
from pipeline.estimate.stage_memory import gpus_here
from pipeline.launch import one_off
from pipeline.report import status as report
from pipeline.run.graph import Stage
from pipeline.slurm.queue import check_not_queued
from pipeline.tables import terminal
from pipeline.text import say, shown
from stages.kinds.evaluate.settings import EVALUATE


@command(
    "evaluate",
    "evaluate the finished stages of a run again",
    "  braid evaluate quickstart --stage merge --problems 5000\n"
    "  braid evaluate quickstart --stage cold_start --domain chain_sum --samples 8\n"
    "  braid evaluate quickstart --stage experts.chain_sum --step 40\n\n"
    "The run's own results.json does not change.\n\n"
    'JSON: {"models": {MODEL: {DOMAIN: {"accuracy", "low", "high", "n"}}}, "results": FILE}.',
    RUN,
    TRUST,
    Argument("--stage", help="only this stage's model (default: all finished ones)"),
    Argument(
        "--domain",
        metavar="NAME",
        action="append",
        default=[],
        help="only this domain, repeatable (default: all)",
    ),
    Argument(
        "--problems",
        metavar="N",
        type=positive,
        help="problems per domain (the defaults of this and the next four: the configuration's)",
    ),
    Argument(
        "--samples",
        dest="samples_per_problem",
        metavar="K",
        type=positive,
        help="answers per problem; more than one also gives pass@K",
    ),
    Argument(
        "--temperature", metavar="T", type=float, help="sampling temperature; 0 is greedy decoding"
    ),
    Argument("--top-p", metavar="P", type=float, help="nucleus sampling threshold, up to 1"),
    Argument("--top-k", metavar="K", type=int, help="sample from the K most likely tokens; 0: all"),
    JSON,
    STEP,
    place=150,
)
def evaluate(arguments: Namespace) -> None:
    """Evaluate finished stages again."""
    run, step = load_trusted_run(arguments), arguments.step
    changes = {
        key: option for key in one_off.FLAGS if (option := getattr(arguments, key)) is not None
    }
    # The run may have no stage of this kind, so the check is of one without a block.
    check_capacity(run.settings, [Stage(EVALUATE.name, EVALUATE.name)], gpus_here(run.settings))
    with run.lock():
        check_not_queued(run)
        on, stage, domains = (terminal(), starting.PROGRAMS), arguments.stage, arguments.domain
        models, path = one_off.evaluate(run, *on, stage, step, domains, changes)
    if arguments.json:
        print_json(arguments, {"models": models, "results": str(path)})
        return
    print(report.results_table(models, step, run.own_domains))
    say(f"\nresults: {shown(path)}")
