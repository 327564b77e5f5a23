"""The command that checks a configuration: `braid validate`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from itertools import chain

from parallel.errors import UserError
from parallel.machine.gpus import usable_gpus
from pipeline.commands.support.arguments import CLUSTER, CONFIG, CONFIG_HELP, JSON, print_json
from pipeline.commands.support.configuration import (
    cautions_of,
    check_cluster_engines,
    load_config,
    too_large,
)
from pipeline.commands.support.registry import Argument, command
from pipeline.config.cautions import graph_cautions, loss_gate_cautions, micro_batch_cautions
from pipeline.config.read import ConfigError
from pipeline.config.rules import policy_cautions
from pipeline.config.validate import dump_resolved
from pipeline.estimate.capacity import machine_shares
from pipeline.run.graph import Stage
from pipeline.run.run import Run
from pipeline.text import say, shown, warn
from stages.rewards.reward import cautions
from stages.settings import RunSettings


@command(
    "validate",
    "check a configuration and list every error in it",
    CONFIG_HELP + "  braid validate configs/quickstart.yaml domains.chain_sum.loop.steps=80\n"
    "  braid validate configs/quickstart.yaml --cluster configs/clusters/mine.yaml\n\n"
    "Also checks that every stage fits into the GPUs' memory, where it is known: gpu_memory_gib\n"
    "of the cluster's profile, whose nodes must also hold the engines, as `braid submit` checks;\n"
    "without one, too few or too small GPUs of this machine are a warning.\n\n"
    'JSON: {"valid": true, "stages", "domains", "warnings"} or {"valid": false, "errors"}; with\n'
    "--resolved the settings.",
    Argument("--resolved", action="store_true", help="print it with every default written out"),
    CLUSTER,
    JSON,
    *CONFIG,
    place=10,
)
def validate(arguments: Namespace) -> None:
    """Check the configuration."""
    try:
        settings = load_config(arguments)
    except ConfigError as error:
        if arguments.json:
            errors = [str(violation) for violation in error.violations]
            print_json(arguments, {"valid": False, "errors": errors})
        # Also with --json: the message goes to standard error, and the exit code is 1.
        raise
    if arguments.resolved:
        if arguments.json:
            print_json(arguments, settings.model_dump(mode="json"))
        else:
            print(dump_resolved(settings), end="")
        return
    stages = Run(arguments.runs_dir / settings.name, settings).stages
    try:
        check_cluster_engines(arguments, settings, stages)
        memory_warnings = too_large(settings, stages, arguments)
    except UserError as error:
        if arguments.json:
            lines = str(error).splitlines()
            errors = [line for line in lines if not line.endswith(":")]  # a title's
            print_json(arguments, {"valid": False, "errors": errors})
        raise
    warnings = [
        *cautions({name: domain.rewards for name, domain in settings.domains.items()}),
        *cautions_of(
            arguments,
            chain(
                policy_cautions(settings),
                micro_batch_cautions(settings),
                loss_gate_cautions(settings),
                graph_cautions(settings),
            ),
        ),
        *_refused_here(settings, stages),
        *memory_warnings,
    ]
    if arguments.json:
        names = [stage.name for stage in stages]
        domains = list(settings.domains)
        verdict = {"valid": True, "stages": names, "domains": domains, "warnings": warnings}
        print_json(arguments, verdict)
        return
    domains_text = ", ".join(settings.domains)
    say(f"{shown(arguments.config)} is valid: {len(stages)} stages, domains {domains_text}")
    warn(warnings)


def _refused_here(settings: RunSettings, stages: Sequence[Stage]) -> Iterator[str]:
    """Yield why `braid run` would refuse the configuration on this machine, if it has GPUs.

    It may be meant for a cluster, whose profile `braid submit` checks.
    """
    try:
        if usable_gpus():
            machine_shares(1, settings, stages)
    except UserError as error:
        for line in str(error).splitlines():
            yield f"braid run is refused on this machine: {line}"
