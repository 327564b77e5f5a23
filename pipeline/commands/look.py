"""The commands that only look: validate, plan, doctor, status, why, diff and logs."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from parallel.errors import UserError
from parallel.machine.gpus import usable_gpus
from pipeline.commands import common
from pipeline.commands.common import (
    CONFIG,
    CONFIG_HELP,
    GPUS,
    JSON,
    RUN,
    STAGE,
    Argument,
    command,
    print_json,
    read_run,
)
from pipeline.config.engine_rules import micro_batch_cautions
from pipeline.config.quantized import loss_gate_cautions
from pipeline.config.read import ConfigError
from pipeline.config.rules import policy_cautions
from pipeline.config.validate import dump_resolved, load_cluster
from pipeline.estimate.capacity import check_capacity
from pipeline.estimate.gpu_memory import unchecked
from pipeline.estimate.memory import memory_report
from pipeline.estimate.stage_memory import stage_memory
from pipeline.launch.runner import machine_shares
from pipeline.report import drawing, explain
from pipeline.report import status as report
from pipeline.report.compare.difference import difference, difference_lines
from pipeline.report.doctor import probe, section_table, sections
from pipeline.report.time_left import estimate
from pipeline.run.directory import RunDirectory
from pipeline.run.edits import edit_json, edit_lines, edit_of
from pipeline.run.graph import Stage, rerun_options
from pipeline.run.ledger import took
from pipeline.run.run import Run
from pipeline.run.select import unfinished
from pipeline.slurm.queue import is_queued, queue_of, states_now
from pipeline.slurm.submit import check_engines
from pipeline.text import reason, say, shown, visible, warn
from stages.directory import EngineDirectory
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
    GPUS,
    JSON,
    *CONFIG,
)
def validate(arguments: Namespace) -> None:
    """Check the configuration."""
    try:
        settings = common.load_config(arguments)
    except ConfigError as error:
        if arguments.json:
            errors = [str(each) for each in error.violations]
            print_json(arguments, {"valid": False, "errors": errors})
        raise
    if arguments.resolved:
        if arguments.json:
            print_json(arguments, settings.model_dump(mode="json"))
        else:
            print(dump_resolved(settings), end="")
        return
    stages = Run(arguments.runs_dir / settings.name, settings).stages
    try:
        _check_engines(arguments, settings, stages)
        too_large = _too_large(settings, stages, arguments)
    except UserError as error:
        if arguments.json:
            lines = str(error).splitlines()
            errors = [line for line in lines if not line.endswith(":")]  # a title's
            print_json(arguments, {"valid": False, "errors": errors})
        raise
    warnings = [
        *cautions({name: each.rewards for name, each in settings.domains.items()}),
        *common.cautions_of(
            arguments,
            chain(
                policy_cautions(settings),
                micro_batch_cautions(settings),
                loss_gate_cautions(settings),
                common.graph_cautions(settings),
            ),
        ),
        *_refused_here(settings, stages),
        *too_large,
    ]
    if arguments.json:
        names = [stage.name for stage in stages]
        domains = list(settings.domains)
        found = {"valid": True, "stages": names, "domains": domains, "warnings": warnings}
        print_json(arguments, found)
        return
    domains_text = ", ".join(settings.domains)
    say(f"{shown(arguments.config)} is valid: {len(stages)} stages, domains {domains_text}")
    warn(warnings)


def _check_engines(arguments: Namespace, settings: RunSettings, stages: Sequence[Stage]) -> None:
    """Raise UserError where `braid submit` would refuse the engines on `--cluster`'s nodes."""
    if arguments.cluster:
        check_engines(settings, load_cluster(arguments.cluster), stages)


def _too_large(settings: RunSettings, stages: Sequence[Stage], arguments: Namespace) -> list[str]:
    """Return why `braid run` would refuse stages for this machine's memory, or none can tell.

    Raises:
        UserError: the GPUs of `--cluster`'s profile have too little.
    """
    try:
        check_capacity(settings, stages, common.known_gpus(arguments, settings))
    except UserError as error:
        if arguments.cluster is not None:
            raise
        return [f"braid run is refused on this machine: {error}"]
    if arguments.cluster is None:
        return []
    return unchecked(load_cluster(arguments.cluster), arguments.cluster, stages)


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


@command(
    "plan",
    "show the stages of a configuration and which of them are done",
    CONFIG_HELP + "  braid plan configs/quickstart.yaml seed=1 --name second\n"
    "  braid plan configs/quickstart.yaml --dot | dot -Tsvg > quickstart.svg\n"
    "  braid plan configs/quickstart.yaml --mermaid\n\n"
    "Does it fit? The memory of each rank and of the engine, before anything is started:\n"
    "  braid plan configs/quickstart.yaml --memory\n"
    "  braid plan configs/quickstart.yaml --memory layout.recompute=full\n"
    "  braid plan configs/quickstart.yaml --memory --cluster configs/clusters/mine.yaml\n\n"
    "Of a run that exists it also shows what an edit of the configuration reuses, makes stale and\n"
    "leaves behind, and the key `was` that keeps the work of a renamed stage.\n\n"
    'JSON: as `braid status RUN --json`, each stage also with "next" and "seconds_left", and\n'
    '"edit": null or {"reused", "stale": {STAGE: CAUSE}, "reruns", "new", "deleted": {STAGE:\n'
    'PATH}, "renamed": [[WAS, BLOCK]]}; with\n'
    '--memory {"stages": {STAGE: [{"parameters", "gradients", "optimizer", "frozen",\n'
    '"activations"}]}}, in bytes by pipeline rank.',
    Argument("--memory", action="store_true", help="show the memory of every stage instead"),
    (
        Argument("--dot", action="store_true", help="print the graph for Graphviz instead"),
        Argument("--mermaid", action="store_true", help="print it for Mermaid, as GitHub draws it"),
    ),
    GPUS,
    JSON,
    *CONFIG,
)
def plan(arguments: Namespace) -> None:
    """Show the stages and what would happen to each; or the memory they need."""
    drawn = arguments.dot or arguments.mermaid
    if drawn and (arguments.json or arguments.memory):
        option, reader = ("--dot", "Graphviz") if arguments.dot else ("--mermaid", "Mermaid")
        raise UserError(f"{option} prints the graph for {reader}; it excludes --json and --memory")
    if arguments.memory:
        settings = common.load_config(arguments, to_start=False)
        stages = Run(arguments.runs_dir / settings.name, settings).stages
        if arguments.json:
            held = {each.name: [asdict(r) for r in stage_memory(each, settings)] for each in stages}
            print_json(arguments, {"stages": held})
        else:
            gpus = common.known_gpus(arguments, settings)
            print(*memory_report(settings, gpus), sep="\n")
        _check_engines(arguments, settings, stages)
        warn(_too_large(settings, stages, arguments))
        return
    run = common.load_configured_run(arguments)
    common.warn_of_graph(arguments, run.settings)
    _check_engines(arguments, run.settings, run.stages)
    states = states_now(run)
    warn(_too_large(run.settings, unfinished(run.stages, states), arguments))
    if drawn:
        say(*(drawing.dot if arguments.dot else drawing.mermaid)(run, states))
        return
    left = estimate(run, states, took(run.events))
    actions = report.next_action(run.stages, states)
    edit = edit_of(run, states)
    if arguments.json:
        found = report.plan_json(run, states, actions, left)
        print_json(arguments, {**found, "edit": edit_json(edit)})
        return
    print(report.plan_text(run, states, actions, left))
    if edit is not None:
        say("", *edit_lines(run, edit, rerun_options(run.stages, edit.stale)))


@command(
    "doctor",
    "show what is installed here, what Braid uses of it, and what to fix",
    "  braid doctor\n"
    "  srun --gres=gpu:8 braid doctor --cluster configs/clusters/mine.yaml    on a node\n\n"
    "✓ works, · is a note, ✗ keeps stages from running and makes the exit code 1: a login node\n"
    "without torch has one too, and still validates, plans and shows runs.\n"
    "`make install` builds an environment for the CPU in which everything works, and\n"
    "`make install-gpu` one for GPUs.\n\n"
    'JSON: {"errors": COUNT, "sections": {HEADING: [{"name", "value", "verdict", "fix"}]}}.',
    Argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="a cluster's profile: fewer GPUs here than it says is an error",
    ),
    JSON,
)
def doctor(arguments: Namespace) -> None:
    """Show what is installed, what is used here, and how to fix what is missing."""
    cluster = load_cluster(arguments.cluster) if arguments.cluster else None
    found = list(sections(probe(), arguments.runs_dir, cluster))
    errors = sum(row.verdict == "error" for _, rows in found for row in rows)
    if arguments.json:
        tables = {heading: [asdict(row) for row in rows] for heading, rows in found}
        print_json(arguments, {"errors": errors, "sections": tables})
    else:
        for heading, rows in found:
            print(section_table(heading, rows), end="\n\n")
    if errors:
        raise UserError(f"{errors} of these (✗) keep stages from running here")
    if not arguments.json:
        say("everything that stages need works here")


@command(
    "status",
    "show the state of a run, or of all runs",
    "  braid status\n  braid status quickstart\n\n"
    'JSON: {"runs": {RUN: {STATE: COUNT} or {"error": TEXT}}}; of one run {"run", "running",\n'
    '"stages": [{"name", "kind", "needs", "steps", "state", "cause", "attempts", "step", "job",\n'
    '"minutes"}], "results": {MODEL: {DOMAIN: {"accuracy", "low", "high", "n"}}} or null}.',
    Argument("run", metavar="RUN", nargs="?", help="the run's name or directory"),
    JSON,
)
def status(arguments: Namespace) -> None:
    """Show the state of a run, or of every run."""
    if arguments.run is not None:
        _show_run(arguments, common.load_run(arguments))
        return
    counts = {path.name: _counts(path) for path in common.run_paths(arguments.runs_dir)}
    if arguments.json:
        print_json(arguments, {"runs": counts})
        return
    if not counts:
        say(f"no runs in {shown(arguments.runs_dir)}")
    for name, found in counts.items():
        text = found.get("error") or ", ".join(f"{n} {state}" for state, n in found.items())
        say(f"{name}: {text}".replace("\n", "\n  "))


def _show_run(arguments: Namespace, run: Run) -> None:
    jobs, unasked = queue_of(run)
    states = run.states_with(jobs)
    if arguments.json:
        print_json(arguments, report.run_state(run, states))
        return
    print(report.status_table(run, states))
    if unasked:
        warn([unasked])
    if report.evaluated(run, states):
        if (models := report.current_models(run, states)) is None:
            again = " ".join(
                f"--from {each.name}" for each in run.stages if each.kind == "evaluate"
            )
            say(f"\n{shown(run.results)} is damaged; rerun the evaluation with {again}")
        else:
            print("", report.results_table(models, own=run.own_domains), sep="\n")
    if not run.is_running() and report.can_continue(run.stages, states):
        say(f"continue with: {run.resume_command()}")


def _counts(path: Path) -> dict[str, Any]:
    """Return how many stages of a run are in each state, or its `error`."""
    try:
        return dict(
            Counter(each.state for each in states_now(read_run(RunDirectory(path))).values())
        )
    except (UserError, OSError) as error:
        return {"error": reason(error)}


@command(
    "why",
    "explain a stage's state: its inputs, its versions and its history",
    "  braid why quickstart merge\n\n"
    'JSON: {"stage", "state", "cause", "attempts", "step", "job", "checkpoint", "inputs",\n'
    '"after", "code", "versions", "events"}.',
    RUN,
    STAGE,
    JSON,
)
def why(arguments: Namespace) -> None:
    """Explain the state of a stage."""
    run = common.load_run(arguments)
    if arguments.json:
        [stage] = run.chosen([arguments.stage])
        print_json(arguments, explain.why_json(run, stage, states_now(run)))
    else:
        say(*map(visible, explain.why(run, arguments.stage)))


@command(
    "diff",
    "show what differs between two runs: settings, data, parents, code, versions",
    "  braid diff quickstart longer       a second run: docs/tutorial.md creates it\n\n"
    'JSON: {"settings": {KEY: [RUN, OTHER_RUN]}, "stages": {STAGE: {FIELD: [RUN, OTHER_RUN]}}}.',
    RUN,
    Argument("other", metavar="OTHER_RUN", help="the other run's name or directory"),
    JSON,
)
def diff(arguments: Namespace) -> None:
    """Show how two runs differ."""
    run = common.load_run(arguments)
    other = read_run(common.find(arguments.runs_dir, arguments.other))
    differing = difference(run, other)
    if arguments.json:
        print_json(arguments, differing)
    else:
        lines = difference_lines(differing)
        say(*map(visible, lines or ["no difference"]))


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
)
def logs(arguments: Namespace) -> None:
    """Show what a stage prints."""
    run = common.load_run(arguments)
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
        own = EngineDirectory(directory.engines / arguments.engine).log
        log = own if own.exists() else run.engine(arguments.engine).log
        explain.print_growing(lambda: log, follow)
    else:
        explain.print_log(directory, f"rank_{arguments.rank or 0}.log", follow, output)


def _newest_job(run: Run, stage: Stage) -> str | None:
    """Return the number of the newest job that a stage had, by the ledger."""
    events = [event for event in run.events if event.stage == stage.name]
    return next((event.job for event in reversed(events) if event.job is not None), None)
