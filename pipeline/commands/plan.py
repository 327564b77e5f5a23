"""The command that shows the stages of a configuration: `braid plan`."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict

from parallel.errors import UserError
from pipeline.commands.support.arguments import CLUSTER, CONFIG, CONFIG_HELP, JSON, print_json
from pipeline.commands.support.configuration import (
    check_cluster_engines,
    known_gpus,
    load_config,
    load_configured_run,
    too_large,
    warn_of_graph,
)
from pipeline.commands.support.registry import Argument, command
from pipeline.estimate.memory import memory_report
from pipeline.estimate.stage_memory import stage_memory
from pipeline.report import drawing
from pipeline.report import status as report
from pipeline.report.time_left import estimate
from pipeline.run.edits import edit_json, edit_lines, edit_of
from pipeline.run.graph import rerun_options
from pipeline.run.ledger import took
from pipeline.run.run import Run
from pipeline.run.select import unfinished
from pipeline.slurm.queue import states_now
from pipeline.text import say, warn


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
    CLUSTER,
    JSON,
    *CONFIG,
    place=20,
)
def plan(arguments: Namespace) -> None:
    """Show the stages and what would happen to each; or the memory they need."""
    as_graph = arguments.dot or arguments.mermaid
    if as_graph and (arguments.json or arguments.memory):
        option, reader = ("--dot", "Graphviz") if arguments.dot else ("--mermaid", "Mermaid")
        raise UserError(f"{option} prints the graph for {reader}; it excludes --json and --memory")
    if arguments.memory:
        settings = load_config(arguments, to_start=False)
        stages = Run(arguments.runs_dir / settings.name, settings).stages
        if arguments.json:
            memory = {
                stage.name: [asdict(r) for r in stage_memory(stage, settings)] for stage in stages
            }
            print_json(arguments, {"stages": memory})
        else:
            gpus = known_gpus(arguments, settings)
            print(*memory_report(settings, gpus), sep="\n")
        # After the table, whose numbers show why a layout does not fit.
        check_cluster_engines(arguments, settings, stages)
        warn(too_large(settings, stages, arguments))
        return
    run = load_configured_run(arguments)
    warn_of_graph(arguments, run.settings)
    check_cluster_engines(arguments, run.settings, run.stages)
    states = states_now(run)
    warn(too_large(run.settings, unfinished(run.stages, states), arguments))
    if as_graph:
        say(*(drawing.dot if arguments.dot else drawing.mermaid)(run, states))
        return
    left = estimate(run, states, took(run.events))
    actions = report.next_action(run.stages, states)
    edit = edit_of(run, states)
    if arguments.json:
        planned = report.plan_json(run, states, actions, left)
        print_json(arguments, {**planned, "edit": edit_json(edit)})
        return
    print(report.plan_text(run, states, actions, left))
    if edit is not None:
        say("", *edit_lines(run, edit, rerun_options(run.stages, edit.stale)))
