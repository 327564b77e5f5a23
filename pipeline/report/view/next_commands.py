"""The commands to run next, with a run's own names in them."""

from __future__ import annotations

import shlex
from pathlib import Path

from pipeline.report.view.findings import Health
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import Stage
from pipeline.text import shown

# What shows the cause of a metric's value; of any other metric it is its curve.
_BY_METRIC = {
    "unfinished": "look {run} {stage} --finish length",
    **dict.fromkeys(
        ("all_wrong", "zero_variance", "reward_spread", "reward", "format_gain"),
        "look {run} {stage} --worst",
    ),
    "similar_responses": "look {run} {stage}",
    "length_inflation": "look {run} {stage} --longest",
    **dict.fromkeys(("high_ratio", "router_agreement"), "look {run} {stage} --tokens"),
    **dict.fromkeys(("idle_experts", "load_balance"), "look {run} {stage} --experts"),
    "reward_failures": "logs {run} {stage}",
    "engine_restarts": "logs {run} {stage} --engine 0",
}


def run_argument(run: RunDirectory) -> str:
    """Return how a command line names a run: its name in runs/, else its path."""
    named = shown(run.path.parent) == "runs"
    return shlex.quote(run.path.name if named else shown(run.path))


def command_for(run: RunDirectory, stage: Stage, metric: str) -> str:
    """Return the command that shows why a stage's metric is as it is."""
    command = _BY_METRIC.get(metric, f"look {{run}} {{stage}} --metric {metric}")
    return "braid " + command.format(run=run_argument(run), stage=shlex.quote(stage.name))


def domain_checks(run: RunDirectory, stage: Stage) -> str:
    """Return the command that scores the references of a stage's domains by their rewards."""
    domains = " ".join(f"--domain {shlex.quote(name)}" for name in stage.domains)
    return f"braid domain check {shlex.quote(shown(run.settings_file))} {domains}"


def problems_lost(run: RunDirectory, stage: Stage, start: str, domain: str) -> str:
    """Return the command that shows the problems that the start solved and a stage's model not."""
    models = f"--model {shlex.quote(start)} --versus {shlex.quote(stage.name)}"
    return f"braid look {run_argument(run)} {models} --domain {shlex.quote(domain)}"


def serve_command(model: Path) -> str:
    """Return the command that serves an exported model."""
    return f"vllm serve {shlex.quote(shown(model))}"


def next_three(run: RunDirectory, health: Health, measured: bool) -> list[str]:
    """Return three commands for who has run it: the causes of alarms first, then where to read.

    `measured` says that several models were, which can then be compared.
    """
    name = run_argument(run)
    causes = [symptom.command for symptom in health.symptoms if symptom.alarm]
    compare = f"braid compare {name}" if measured else f"braid status {name}"
    commands = [*causes, f"braid look {name}", f"braid report {name}", compare]
    return [*dict.fromkeys(commands)][:3]
