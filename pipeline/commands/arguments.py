"""The arguments of every `braid` command, and the help that teaches them."""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path

from pipeline.commands.action_arguments import (
    add_domain_commands,
    add_gate_commands,
    add_trust,
    positive,
    whole,
)
from pipeline.run.neutral import MAY_CHANGE

EXIT_CODES = """\
exit codes:
  0    done
  1    a failure, told in one message: what failed, where, and how to mend it
  2    the command line is not understood
  130  stopped by Ctrl-C; 143 by SIGTERM. The run continues with `braid resume`.
"""

DESCRIPTION = """\
Post-train a mixture-of-experts model: one cold start, one expert a domain grown from it, and one
model braided back out of the experts.

a first run, from its settings to its results:
  braid doctor                               can this machine run it?
  braid validate configs/quickstart.yaml     is the configuration right?
  braid plan configs/quickstart.yaml         what will run, and from what?
  braid run configs/quickstart.yaml          run it here, with progress and a table at the end
  braid status quickstart                    where does it stand? (from another terminal)
  braid resume quickstart                    continue after a crash, a kill or Ctrl-C
"""

CONFIG_HELP = """\
CONFIG is a YAML file. Any key may be laid over from the command line, as dotted.key=value:
"""


def parser() -> ArgumentParser:
    """Of the whole command."""
    braid = ArgumentParser(
        "braid",
        description=DESCRIPTION,
        epilog=EXIT_CODES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    commands = braid.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, summary: str, details: str) -> ArgumentParser:
        added = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=details,
            formatter_class=RawDescriptionHelpFormatter,
        )
        added.add_argument(
            "--runs-dir", type=Path, default=Path("runs"), help="where runs lie (default: runs)"
        )
        return added

    _add_config_commands(command)
    _add_run_commands(command)
    add_gate_commands(command)
    add_domain_commands(command)
    return braid


def _add_config_commands(command: Callable[[str, str, str], ArgumentParser]) -> None:
    validate = command(
        "validate",
        "check a configuration and list everything wrong with it",
        CONFIG_HELP + "  braid validate configs/quickstart.yaml domains.chain_sum.loop.steps=80",
    )
    validate.add_argument(
        "--resolved", action="store_true", help="print it with every default written out"
    )
    plan = command(
        "plan",
        "show the stages of a configuration and which of them are done",
        CONFIG_HELP
        + "  braid plan configs/quickstart.yaml seed=1 --name second\n"
        + "  braid plan configs/quickstart.yaml --dot | dot -Tsvg > quickstart.svg\n\n"
        + "Does it fit? Bytes a rank and the engine hold, before anything is started:\n"
        + "  braid plan configs/quickstart.yaml --memory\n"
        + "  braid plan configs/quickstart.yaml --memory layout.recompute=full",
    )
    plan.add_argument(
        "--memory", action="store_true", help="show the memory that every stage needs instead"
    )
    plan.add_argument("--dot", action="store_true", help="print the graph for Graphviz instead")
    run = command(
        "run",
        "run a configuration on this machine",
        CONFIG_HELP
        + "  braid run configs/quickstart.yaml\n"
        + "  braid run configs/quickstart.yaml --name no-kl "
        + "domains.spell_backward.objective.kl.coefficient=0\n\n"
        + "Everything of the run lies in runs/NAME. Run again, the same configuration continues,\n"
        + "and nothing that is done is done twice. Another one under the same name is refused\n"
        + "where stages have work that its settings would have made otherwise: --from makes those\n"
        + "anew. What `braid resume --help` names may always differ.\n\n"
        + "  braid run configs/quickstart.yaml --only cold_start --only experts.chain_sum\n"
        + "  braid run configs/quickstart.yaml domains.chain_sum.loop.steps=80 "
        + "--from experts.chain_sum\n"
        + "  braid run configs/quickstart.yaml --name no-kl --fork quickstart "
        + "domains.spell_backward.objective.kl.coefficient=0",
    )
    run.add_argument(
        "--dry-run",
        action="store_true",
        help="show the plan and the commands that these options lead to, and run nothing",
    )
    _add_selection(run)
    _add_side_by_side(run)
    submit = command(
        "submit",
        "hand the stages of a configuration that are not done to Slurm",
        CONFIG_HELP
        + "  braid submit configs/quickstart.yaml --cluster configs/clusters/mine.yaml --dry-run\n"
        + "  braid submit configs/quickstart.yaml --cluster configs/clusters/mine.yaml\n"
        + "  braid submit runs/quickstart/run.yaml      continue it, on the same cluster\n"
        + "  braid submit runs/quickstart/run.yaml --from merge      and make that anew\n\n"
        + "Every stage is a job of one of the scripts in slurm/, which waits for those it is made\n"
        + "from. --dry-run shows the very commands and writes nothing; --prepare makes the run's\n"
        + "folder, for a person to run them: they stand in runs/NAME/slurm/submit.sh.\n"
        + "docs/explanation/slurm.md has the rest.",
    )
    submit.add_argument(
        "--cluster", type=Path, metavar="FILE", help="its profile (default: the run's last one)"
    )
    without = submit.add_mutually_exclusive_group()
    without.add_argument(
        "--dry-run", action="store_true", help="show the commands; submit and write nothing"
    )
    without.add_argument(
        "--prepare",
        action="store_true",
        help="make the run's folder with the commands in it, and submit nothing",
    )
    _add_selection(submit)
    for parser in (run, submit):
        parser.add_argument(
            "--fork",
            metavar="OTHER_RUN",
            help="take over its finished stages that this run would make from the same things",
        )
        add_trust(parser)
        parser.add_argument(
            "--check-refit",
            dest="implied",
            action="append_const",
            const="engine.check_refit=true",
            default=[],
            help="compare every engine tensor with the trainer's, by checksum, after each refit: "
            "engine.check_refit=true",
        )
    for parser in (validate, plan, run, submit):
        parser.add_argument("config", type=Path, metavar="CONFIG", help="the run's YAML file")
        parser.add_argument(
            "overrides", nargs="*", default=[], metavar="KEY=VALUE", help="laid over the file"
        )
        parser.add_argument("--name", help="the run's name, instead of the configuration's")


def _add_selection(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--only",
        metavar="STAGE",
        action="append",
        default=[],
        help="run this stage alone, as experts.math; may be given again for others",
    )
    parser.add_argument(
        "--from",
        dest="anew",
        metavar="STAGE",
        action="append",
        default=[],
        help="make this stage and all that follows it anew; what they left is kept in replaced/",
    )


def _add_side_by_side(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--side-by-side",
        metavar="N",
        type=positive,
        default=1,
        help="so many stages at once, each on its part of the cores and with engines of its own",
    )


def _add_run_commands(command: Callable[[str, str, str], ArgumentParser]) -> None:
    command(
        "doctor",
        "show what is installed here, what is used of it, and what to mend",
        "  braid doctor\n"
        "  srun --gres=gpu:1 braid doctor             on the nodes that will run the stages\n\n"
        "✓ is right, · is worth knowing, ✗ keeps stages from running and makes the exit code 1:\n"
        "a login node without torch has one too, and still validates, plans and shows.\n"
        "`make install` builds an environment for the CPU in which everything fits.",
    )
    resume = command(
        "resume",
        "continue a run from the newest whole checkpoint of each unfinished stage",
        "  braid resume quickstart\n"
        "  braid resume /scratch/runs/quickstart\n\n"
        "To continue with other settings, `braid run` the configuration with them under the same\n"
        f"name. These may change, since they decide no result:\n{MAY_CHANGE}",
    )
    _add_selection(resume)
    _add_side_by_side(resume)
    stage = command(
        "stage",
        "run one stage of a run: what the stage scripts in slurm/ do",
        "  braid stage runs/quickstart experts.chain_sum\n\n"
        "In a job of Slurm's, ranks and engines are steps of it; elsewhere they run here. The\n"
        "run's folder is what `braid run` or `braid submit --prepare` has made.",
    )
    cancel = command(
        "cancel",
        "take a run's jobs out of Slurm's queue; stages that run save first",
        "  braid cancel quickstart\n  braid cancel quickstart experts.chain_sum",
    )
    logs = command(
        "logs",
        "show what a stage prints",
        "  braid logs quickstart experts.chain_sum -f           what its job prints\n"
        "  braid logs quickstart experts.chain_sum --rank 3\n"
        "  braid logs quickstart experts.chain_sum --engine 0",
    )
    status = command(
        "status",
        "show where a run stands, or all runs",
        "  braid status\n  braid status quickstart",
    )
    why = command(
        "why",
        "explain a stage's state: what it was made from, and what happened to it",
        "  braid why quickstart merge",
    )
    diff = command(
        "diff",
        "show what differs between two runs: settings, data, parents, code, versions",
        "  braid diff quickstart no-kl",
    )
    evaluate = command(
        "evaluate",
        "evaluate the finished stages of a run once more",
        "  braid evaluate quickstart --stage merge --problems 5000\n"
        "  braid evaluate quickstart --stage cold_start --domain chain_sum --samples 8\n"
        "  braid evaluate quickstart --stage experts.chain_sum --step 40\n\n"
        "The run's own results.json stays as it is.",
    )
    audit = command(
        "audit",
        "compute a step again from the run's files, and compare it with what was logged",
        "  braid audit quickstart                       every stage's newest step that can be\n"
        "  braid audit quickstart experts.chain_sum --step 40\n\n"
        "An implementation of its own, in float64, on transformers' model classes: losses,\n"
        "advantages, KL, corrections, routing losses, gradients, the optimizer and the weights.\n"
        "It needs a run with logging.auditable=true, and the checkpoint that the step began with\n"
        "(loop.checkpoint_every=1); with the one it left, weights are compared too.\n"
        "The exit code is 1 where something differs.",
    )
    export = command(
        "export",
        "write a finished stage's model as a Hugging Face checkpoint",
        "  braid export quickstart --stage experts.chain_sum --to /tmp/chain_sum\n"
        "  braid export quickstart --stage experts.chain_sum --step 40 --to /tmp/at_its_best\n\n"
        "Which steps there are, loop.keep_last and loop.keep_best decide.",
    )
    for parser in (resume, stage, cancel, logs, why, diff, evaluate, export, audit):
        parser.add_argument("run", metavar="RUN", help="the run's name, or its folder")
    status.add_argument("run", metavar="RUN", nargs="?", help="the run's name, or its folder")
    for parser in (resume, stage, evaluate, export, audit):
        add_trust(parser)
    for parser in (stage, logs, why):
        parser.add_argument("stage", metavar="STAGE", help="its name, as `braid status` shows it")
    cancel.add_argument("stages", metavar="STAGE", nargs="*", help="only these (default: all)")
    cancel.add_argument(
        "--now", action="store_true", help="end those that run without waiting for a checkpoint"
    )
    logs.add_argument("-f", "--follow", action="store_true", help="go on while the stage does")
    logs.add_argument(
        "--rank",
        type=int,
        metavar="N",
        help="a rank's (default: the job's output of its progress; without one, rank 0)",
    )
    logs.add_argument("--engine", type=int, metavar="N", help="an engine's instead of a rank's")
    diff.add_argument("other", metavar="OTHER_RUN", help="another run's name, or its folder")
    evaluate.add_argument("--stage", help="only this stage's model (default: all finished ones)")
    evaluate.add_argument(
        "--domain", metavar="NAME", action="append", default=[], help="on this one (default: all)"
    )
    evaluate.add_argument(
        "--problems",
        metavar="N",
        type=positive,
        help="problems a domain (default of this and of the next two: the configuration's)",
    )
    evaluate.add_argument(
        "--samples",
        dest="samples_per_problem",
        metavar="K",
        type=positive,
        help="answers to each problem; with several, pass@K too",
    )
    evaluate.add_argument(
        "--temperature", metavar="T", type=float, help="0 takes the likeliest tokens"
    )
    evaluate.add_argument("--json", action="store_true", help="print what was found as JSON")
    for parser in (evaluate, export):
        parser.add_argument(
            "--step",
            metavar="N",
            type=whole,
            help="the stage's whole checkpoint of this step, done or not (default: the newest of a "
            "stage that is done)",
        )
    audit.add_argument("stage", metavar="STAGE", nargs="?", help="only this one (default: all)")
    audit.add_argument("--step", metavar="N", type=whole, help="this step of the stage")
    audit.add_argument("--json", action="store_true", help="print the comparison as JSON")
    export.add_argument("--stage", required=True, help="whose model, such as merge")
    export.add_argument("--to", required=True, type=Path, help="a folder that is new or empty")
