"""The command that writes a new run's configuration: `braid init`."""

from __future__ import annotations

import shlex
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from parallel.errors import UserError
from parallel.estimates.roofline.hardware import GIB, GPUS
from pipeline.commands.support.arguments import JSON, number_within, positive, print_json
from pipeline.commands.support.init_inputs import (
    COLUMN_KEYS,
    check_given,
    check_kept,
    check_names,
    check_output,
    column_named,
    columns_of,
    demonstrations_named,
    domain_named,
    expanded,
    model_named,
    profile_of,
    shipped_kinds,
    shipped_models,
    write_files,
)
from pipeline.commands.support.registry import Argument, command
from pipeline.config.checkpoints import has_weights
from pipeline.config.cluster import FORMS, WALLTIME, ClusterSettings, seconds_of
from pipeline.config.read import CONFIGS
from pipeline.config.tokenizers import has_thoughts
from pipeline.config.validate import load_cluster
from pipeline.estimate.budget import MARGIN
from pipeline.estimate.simulation import (
    FILLED,
    PER_NODE,
    Assumptions,
    data_sheet,
    sheets_of_kinds,
    simulation_text,
)
from pipeline.new_run.new_run import Prepared, prepare
from pipeline.new_run.run_blocks import RunRequest
from pipeline.new_run.run_file import profile_text
from pipeline.run.graph import compile_graph
from pipeline.text import say, shown

EXAMPLE = CONFIGS / "clusters" / "example.yaml"
USABLE = 0.99  # of a data sheet's memory, as nvidia-smi shows it
RANKS = 2  # on CPU cores
PATHS = ("model", "cluster", "target")  # of the options that are asked for


def _walltime(text: str) -> float:
    if not WALLTIME.fullmatch(text) or not seconds_of(text):
        raise ArgumentTypeError(f"{text} is not {FORMS}")
    return float(seconds_of(text))


@command(
    "init",
    "write the configuration of a run of your model, data and GPUs",
    "  braid init --model /models/Qwen3-30B-A3B --domains math=/data/math.jsonl "
    "code=/data/code.jsonl \\\n"
    "      --gpus 32 --gpu h100 --budget 1500 --output mine.yaml\n"
    "  braid init --model /models/tiny --domains math=/data/math.jsonl --output small.yaml\n\n"
    "What is not given is asked for on a terminal; without --gpus, ranks run on CPU cores. The\n"
    "run extends files of configs/. Its model is read from config.json, its layout is one that\n"
    "`braid simulate --search` finds, and its rows are checked, with the answers that rewards\n"
    "must read. With GPUs a cluster's profile with the walltimes is written beside it. Where\n"
    "anything is wrong, nothing is written.\n\n"
    'JSON: {"written": [FILE], "name", "layout", "engine", "steps": {STAGE: N}, "gpu_hours",\n'
    '"full_gpu_hours", "walltimes": {KIND: TIME}, "rows": {DOMAIN: {"rows", "trained",\n'
    '"held_out", "for_gates", "repeated", "unusable", "longest", "right", "passes"}},\n'
    '"notes": [TEXT], "commands": [COMMAND]}.',
    Argument(
        "--model",
        metavar="MODEL",
        help="a Hugging Face checkpoint's directory, or a file of configs/models by name",
    ),
    Argument(
        "--weights",
        type=Path,
        metavar="DIRECTORY",
        help="of the weights and the tokenizer of a model given by name",
    ),
    Argument(
        "--domains",
        nargs="+",
        metavar="NAME=ROWS",
        help="a domain of configs/domains and its rows: math=/data/math.jsonl; NAME:KIND=ROWS names"
        " it otherwise (algebra:math=rows.jsonl), NAME=FILE.yaml is a domain of yours; ROWS is a"
        " file, a quoted pattern, or a data set: DIRECTORY:SPLIT, hf:OWNER/NAME:SPLIT",
    ),
    Argument(
        "--columns",
        nargs="+",
        action="extend",
        type=column_named,
        default=[],
        metavar="[DOMAIN.]KEY=COLUMN",
        help="columns that have other names, of all rows or of a domain's: prompt=question"
        f" math.answer=reward_model.ground_truth; keys: {', '.join(COLUMN_KEYS)} (repeatable)",
    ),
    Argument(
        "--sft",
        metavar="ROWS",
        help="demonstrations to fine-tune the model on before the experts: chat messages in the"
        " column messages, or --columns demonstrations.prompt=COLUMN"
        " demonstrations.response=COLUMN; ROWS as of --domains",
    ),
    Argument("--gpus", type=positive, metavar="N", help="GPUs (default: CPU cores)"),
    Argument("--gpu", metavar="NAME", help=f"{', '.join(GPUS)} (default: the profile's gpu_type)"),
    Argument(
        "--gpus-per-node",
        type=positive,
        metavar="N",
        help="GPUs of a node (default: the profile's, else 8)",
    ),
    Argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="the cluster's profile (default: none, or with GPUs one to fill in)",
    ),
    Argument(
        "--budget",
        type=number_within("number of GPU hours above 0", lambda hours: 0 < hours < 1e9),
        metavar="HOURS",
        help="GPU hours of training; steps are cut where more are simulated",
    ),
    Argument(
        "--longest-walltime",
        type=_walltime,
        default=_walltime("1-00:00:00"),
        metavar="TIME",
        help="the most that a job may ask for; longer stages are requeued (default: 1-00:00:00)",
    ),
    Argument(
        "--ranks",
        type=positive,
        metavar="N",
        help="ranks of a run on CPU cores (default: 2)",
    ),
    Argument("--name", help="the run's name (default: that of the file)"),
    Argument("--output", dest="target", type=Path, metavar="FILE", help="the YAML file to write"),
    Argument("--force", action="store_true", help="overwrite the files"),
    Argument("--dry-run", action="store_true", help="show what would be written; write nothing"),
    Argument("--yes", action="store_true", help="ask nothing"),
    JSON,
    place=110,
)
def init(arguments: Namespace) -> None:
    """Write a new run's configuration, and say how to continue."""
    asks = sys.stdin.isatty() and not arguments.yes and not arguments.json
    if asks:
        _ask(arguments)
    check_given(arguments)
    check_names(arguments.domains)
    output: Path = arguments.target
    files = [output, profile_of(arguments)]
    if not arguments.dry_run:
        check_output(files if arguments.gpus else files[:1], arguments.force)
    check_kept("--cluster", [arguments.cluster], files)
    profile = load_cluster(arguments.cluster) if arguments.cluster else None
    request = _request(arguments, profile)
    check_kept("--domains", chain(*request.domains.values()), files)
    check_kept("--sft", [request.demonstrations], files)
    prepared = prepare(request, _quiet if arguments.json else _announce)
    texts = {output: prepared.run.text(output.absolute().parent)}
    if arguments.gpus:
        texts[files[1]] = _profile(arguments, profile, prepared, files[1].absolute().parent)
    commands = _commands(arguments, prepared, files[1] if arguments.gpus else arguments.cluster)
    _show(arguments, prepared, texts)
    write = not arguments.dry_run
    if write and asks and _line(f"write {_file_names(texts)}? [Y/n] ").lower() in ("n", "no"):
        say("nothing is written")
        return
    if write:
        write_files(texts, arguments.force)
    say(f"{'wrote' if write else 'would write'} {_file_names(texts)}")
    if arguments.gpus and arguments.cluster is None:
        say(f"fill in your cluster's keys, commented out in {shown(files[1])}")
    then = "continue with:" if write else "after the same command without --dry-run, continue with:"
    say(then, *(f"  {line}" for line in commands))
    if arguments.gpus and arguments.cluster is None:
        say(f"or, where this machine has the GPUs: braid run {shlex.quote(shown(output))}")
    if arguments.json:
        print_json(arguments, _as_json(prepared, texts if write else {}, commands))


def _announce(text: str) -> None:
    say(text, file=sys.stderr, flush=True)


def _quiet(_: str) -> None:
    """Say nothing: a program reads the output."""


@dataclass(frozen=True)
class _Question:
    """A question for an option that is not given; `default` is None where an answer is needed."""

    option: str
    text: str
    default: str | None = None


def _ask(arguments: Namespace) -> None:
    """Ask for the options that are not given, with the command's own parser of each answer."""
    kinds, models = ", ".join(shipped_kinds()), ", ".join(model.stem for model in shipped_models())
    questions = [
        _Question("model", f"model, a directory with config.json or one of {models}"),
        _Question("domains", f"domains with their rows, NAME=ROWS, NAME one of {kinds}"),
        _Question("gpus", "number of GPUs; empty for CPU cores", ""),
        _Question("gpu", f"their type: {', '.join(GPUS)}", "h100"),
        _Question("cluster", "the cluster's profile; empty for none", ""),
        _Question("budget", "budget in GPU hours; empty for none", ""),
        _Question("target", "file to write", "mine.yaml"),
    ]
    for question in questions:
        of_gpus = question.option in ("gpu", "budget")
        if getattr(arguments, question.option) is not None or (of_gpus and not arguments.gpus):
            continue
        if question.option == "gpus" and arguments.ranks is not None:
            continue
        if answer := _answer(question):
            flag = "--output" if question.option == "target" else f"--{question.option}"
            # A shell would have replaced the ~ of an option; that of rows is replaced later.
            of_home = question.option in PATHS and answer.startswith("~")
            whole = [str(expanded(answer, flag))] if of_home else [answer]
            more = answer.split() if question.option == "domains" else whole
            parsed = arguments.parser.parse_args([flag, *more])
            setattr(arguments, question.option, getattr(parsed, question.option))
        by_name = any(answer == model.stem for model in shipped_models())
        if question.option == "model" and arguments.weights is None and by_name:
            weights = _answer(_Question("weights", "directory of its weights"))
            arguments.weights = expanded(weights, "--weights")


def _answer(question: _Question) -> str:
    default = f" [{question.default}]" if question.default else ""
    while True:
        answer = _line(f"{question.text}{default}: ") or question.default
        if answer is not None:
            return answer


def _line(prompt: str) -> str:
    """Return a line of the terminal; raise UserError where it was closed."""
    try:
        return input(prompt).strip()
    except EOFError:
        raise UserError("no answer; nothing is written") from None


def _request(arguments: Namespace, profile: ClusterSettings | None) -> RunRequest:
    dry_run = arguments.dry_run
    model, described, weights = model_named(arguments.model, arguments.weights, dry_run=dry_run)
    per_node = arguments.gpus_per_node or (profile and profile.gpus_per_node) or PER_NODE
    gpus = arguments.gpus
    if gpus is not None and gpus > per_node and gpus % per_node:
        below = gpus - gpus % per_node
        raise UserError(
            f"--gpus {gpus}: no multiple of the {per_node} GPUs of a node; use {below} or "
            f"{below + per_node}, or --gpus-per-node"
        )
    sheet = data_sheet(arguments.gpu, profile) if gpus else None
    kinds = sheets_of_kinds(arguments.gpu, profile) if gpus else {}
    domains = dict(map(domain_named, arguments.domains))
    return RunRequest(
        name=arguments.name or arguments.target.stem,
        output=arguments.target,
        model=model,
        described=described,
        weights=weights,
        domains=domains,
        ranks=gpus or arguments.ranks or RANKS,
        gpus=Assumptions(sheet, per_node, FILLED, 1.0, kinds) if sheet else None,
        gpu=arguments.gpu or (profile and profile.gpu_type) or "",
        budget=arguments.budget,
        longest_walltime=arguments.longest_walltime,
        columns=columns_of(arguments.columns, domains),
        thinks=has_thoughts(weights),
        has_weights=not dry_run or has_weights(weights),
        demonstrations=demonstrations_named(arguments.sft),
    )


def _profile(
    arguments: Namespace, profile: ClusterSettings | None, prepared: Prepared, directory: Path
) -> str:
    """Return the text of the cluster's profile with this run's walltimes."""
    keys: dict[str, Any] = {}
    sheet = data_sheet(arguments.gpu, profile)
    per_node = arguments.gpus_per_node or (profile and profile.gpus_per_node) or PER_NODE
    if profile is None or profile.gpus_per_node != per_node:
        keys |= {"ranks_per_node": per_node, "gpus_per_node": per_node}
    if profile is None:  # a cluster's own may ask Slurm for GPUs without a type
        keys["gpu_type"] = arguments.gpu.lower()
    if profile is None or profile.gpu_memory_gib is None:
        keys["gpu_memory_gib"] = round(USABLE * sheet.memory_bytes / GIB, 1)
    head = (
        f"The walltimes of {shown(arguments.target)}: {MARGIN:g} times the longest simulated stage "
        f"of a kind and\nhalf an hour, at most --longest-walltime; a stage that takes longer is "
        "requeued."
    )
    base, fill_in = arguments.cluster or EXAMPLE, profile is None
    return profile_text(base, directory, keys, prepared.walltimes, head, fill_in=fill_in)


def _commands(arguments: Namespace, prepared: Prepared, profile: Path | None) -> list[str]:
    run = shlex.quote(shown(arguments.target))
    cluster = f" --cluster {shlex.quote(shown(profile))}" if profile else ""
    gpu = f" --gpu {arguments.gpu}" if arguments.gpu else ""  # else the profile's gpu_type
    simulate = f"braid simulate {run}{gpu}{cluster}"
    if profile:
        start = [f"braid submit {run}{cluster} --dry-run", f"braid submit {run}{cluster}"]
    else:
        start = [f"braid run {run} --dry-run", f"braid run {run}"]
    return [
        f"braid validate {run}{cluster}",
        f"braid domain check {run}",
        f"braid plan {run}",
        *([simulate] if prepared.times else []),
        *start,
    ]


def _show(arguments: Namespace, prepared: Prepared, texts: dict[Path, str]) -> None:
    for path, text in texts.items():
        say(f"── {shown(path)}", text)
    if prepared.times:
        print(simulation_text(prepared.times, prepared.settings), end="\n\n")
        say(
            f"{prepared.gpu_hours:,.0f} GPU hours of training; evaluation, import and export are "
            "extra"
        )
    for note in prepared.notes:
        say(f"· {note}")


def _file_names(texts: Iterable[Path]) -> str:
    return " and ".join(map(shown, texts))


def _as_json(prepared: Prepared, texts: dict[Path, str], commands: list[str]) -> dict[str, Any]:
    settings = prepared.settings
    return {
        "written": [str(path) for path in texts],
        "name": settings.name,
        "layout": settings.layout.model_dump(mode="json"),
        "engine": {"count": settings.engine.count, "tensor": settings.engine.tensor},
        "steps": {stage.name: stage.steps for stage in compile_graph(settings) if stage.steps},
        "gpu_hours": prepared.gpu_hours,
        "full_gpu_hours": prepared.full_hours,
        "walltimes": dict(prepared.walltimes),
        "rows": {name: vars(rows) for name, rows in prepared.data.items()},
        "notes": list(prepared.notes),
        "commands": commands,
    }
