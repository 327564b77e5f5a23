"""The command that says how long a run would take: `braid simulate`."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from functools import partial

from parallel.errors import UserError
from parallel.estimates.roofline.hardware import GPUS
from pipeline.commands.support.arguments import (
    CLUSTER,
    CONFIG,
    CONFIG_HELP,
    JSON,
    number_within,
    positive,
    print_json,
)
from pipeline.commands.support.configuration import load_config
from pipeline.commands.support.registry import Argument, command
from pipeline.config.rules import violations
from pipeline.config.validate import load_cluster
from pipeline.estimate.capacity import check_capacity, check_searched
from pipeline.estimate.layout_search import best_layouts, node_of, search_json, search_text
from pipeline.estimate.memory import memory_report
from pipeline.estimate.simulation import (
    FILLED,
    PER_NODE,
    Assumptions,
    data_sheet,
    sheets_of_kinds,
    simulated,
    simulation_json,
    simulation_text,
)
from pipeline.estimate.stage_memory import stage_memory
from pipeline.run.graph import compile_graph

SHOWN, TRIED = 5, 200  # layouts that the search proposes, of the fastest ones


@command(
    "simulate",
    "show how long every stage would take on GPUs, and which layouts are fastest",
    CONFIG_HELP + "  braid simulate mine.yaml --gpu h100\n"
    "  braid simulate mine.yaml --gpu h200 layout.expert=16 engine.tensor=4\n"
    "  braid simulate mine.yaml --cluster configs/clusters/mine.yaml --filled 0.8\n"
    "  braid simulate mine.yaml --gpu h100 --search 64     # the fastest layouts of 64 GPUs\n\n"
    "A roofline with one set of efficiencies, which gives nine published steps on H100 within\n"
    "20 % (docs/explanation/simulation.md); GPUs of other kinds are less certain. Nothing of the\n"
    "run needs to exist: neither weights nor tokenizer nor a GPU.\n\n"
    'JSON: {"stages": {STAGE: {"steps", "gpus", "tokens", "seconds": {"rollout", "logprobs",\n'
    '"train", "weight_sync", "other", "bubble", "overlapped", "total"}, "rollout_share",\n'
    '"tokens_per_second_and_gpu", "duration", "gpu_hours"}}, "gpu_hours", "memory": {STAGE:\n'
    '[{"parameters", ...}]}}, in seconds and bytes; with --search {"layouts": [{"overrides",\n'
    '"duration", "gpu_hours", "filled"}]}.',
    Argument("--gpu", metavar="NAME", help=f"{', '.join(GPUS)} (default: the profile's gpu_type)"),
    CLUSTER,
    Argument(
        "--filled",
        type=number_within("share from above 0 to 1", lambda value: 0 < value <= 1),
        default=FILLED,
        metavar="SHARE",
        help="mean length of a sequence as a share of the longest (default 0.6)",
    ),
    Argument(
        "--imbalance",
        type=number_within("ratio from 1 to 1000", lambda value: 1 <= value <= 1000),
        default=1.0,
        metavar="RATIO",
        help="tokens of the fullest expert-parallel rank over their mean (default 1)",
    ),
    Argument(
        "--search",
        type=positive,
        metavar="GPUS",
        help="propose the fastest legal layouts of this number of GPUs instead",
    ),
    JSON,
    *CONFIG,
    place=120,
)
def simulate(arguments: Namespace) -> None:
    """Show the seconds of every stage, or the layouts with the fewest."""
    if arguments.search is not None:
        check_searched("--search", arguments.search)
    settings = load_config(arguments, to_start=False)
    stages, assumed = compile_graph(settings), _assumed(arguments)
    if arguments.search is not None:
        tried = best_layouts(stages, settings, arguments.search, assumed, TRIED)
        # A step or an evaluation may have too few problems for the data-parallel ranks of some.
        layouts = [layout for layout in tried if not any(violations(layout.settings))][:SHOWN]
        if not layouts:
            raise UserError(
                f"no valid layout of {arguments.search} GPUs fits the model in their memory; search"
                " more GPUs, or lower loop.micro_batch_tokens or engine.max_sequences"
            )
        if arguments.json:
            print_json(arguments, search_json(layouts, arguments.search))
        else:
            print(search_text(layouts, arguments.search))
        return
    node = partial(node_of, assumed)
    times = simulated(stages, settings, assumed)
    if arguments.json:
        memory = {
            stage.name: [asdict(r) for r in stage_memory(stage, settings)] for stage in stages
        }
        print_json(arguments, {**simulation_json(times), "memory": memory})
    else:
        print(simulation_text(times, settings))
        print(*memory_report(settings, node), sep="\n")
    # After the table, whose numbers show why a layout does not fit.
    check_capacity(settings, stages, node)


def _assumed(arguments: Namespace) -> Assumptions:
    profile = load_cluster(arguments.cluster) if arguments.cluster else None
    per_node = (profile.gpus_per_node if profile else None) or PER_NODE
    return Assumptions(
        data_sheet(arguments.gpu, profile),
        per_node,
        arguments.filled,
        arguments.imbalance,
        sheets_of_kinds(arguments.gpu, profile),
    )
