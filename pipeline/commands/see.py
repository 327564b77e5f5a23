"""The command that shows what a run does: `braid look`."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from itertools import islice
from math import isfinite
from typing import Any

from parallel.errors import UserError
from pipeline.commands import common
from pipeline.commands.common import JSON, RUN, Argument, command, print_json
from pipeline.report import status as report
from pipeline.report.health import symptoms
from pipeline.report.overview import health_lines, overview_json, stage_table
from pipeline.report.sample_text import sample_lines, token_table
from pipeline.report.tables import table
from pipeline.report.waits import waits, waits_table
from pipeline.run.ledger import took
from pipeline.run.metrics import newest_lines
from pipeline.run.run import Run
from pipeline.slurm.queue import states_now
from pipeline.text import say
from stages.data.tokenizer import load_tokenizer

MOST_BYTES = 1 << 26  # of a stage's metrics that are read, from their end


# Which of two models, --model and --versus, solves a problem.
SOLVED_BY = {"model": "only_first", "versus": "only_second", "both": "both", "neither": "neither"}
ALONE = ["only_first", "only_second"]


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None


def _reward(text: str) -> tuple[str, float]:
    """Return the reward's name and score of `NAME=SCORE`; "" is the name of the sum."""
    name, _, score = text.rpartition("=")
    try:
        value = float(score)
    except ValueError:
        value = float("nan")
    if not isfinite(value):
        raise ArgumentTypeError(f"{text!r} is not SCORE or NAME=SCORE, such as right=0")
    return name, value


def _order(name: str, text: str) -> Argument:
    return Argument(f"--{name}", dest="order", action="store_const", const=name, help=text)


@command(
    "look",
    "show how a run does: its health, its curves, and its samples",
    "  braid look quickstart                                  health, curves, where time goes\n"
    "  braid look quickstart experts.chain_sum                samples of a stage\n"
    "  braid look quickstart experts.chain_sum --worst --count 3\n"
    "  braid look quickstart experts.chain_sum --flipped      once wrong, later right, or back\n"
    "  braid look quickstart experts.chain_sum --reward exact=0 --step 12 --tokens\n"
    "  braid look quickstart evaluate --model merge --grep '^<>'\n"
    "  braid look quickstart --model cold_start --versus merge    who solves what\n\n"
    "Of each token --tokens shows the engine's and the trainer's log-probability, the entropy and\n"
    "the advantage, as far as they are recorded (logging.tokens).\n\n"
    "With --waits: each rank and engine of what runs, its phase, and since when.\n"
    "With --versus, McNemar's p is of the exact test that both models solve equally many.\n\n"
    'JSON: {"run", "health": [{"stage", "what", "remedy", "alarm"}], "stages": [{"name",\n'
    '"state", "step", "steps", "metric", "values"}]}; with STAGE {"count", "samples": [...]},\n'
    'whose columns docs/reference/samples.md explains; with --waits {"processes": [{"stage",\n'
    '"process", "phase", "waits_for", "seconds"}]}.',
    RUN,
    Argument("stage", metavar="STAGE", nargs="?", help="show samples of this stage"),
    (
        _order("worst", "lowest reward first, the newest of these first"),
        _order("longest", "most tokens first"),
        _order("flipped", "prompts right in their first step and wrong in their last, or back"),
    ),
    Argument("--step", type=common.positive, action="append", metavar="N", help="only this step"),
    Argument("--domain", metavar="DOMAIN", help="only this domain"),
    Argument("--model", metavar="MODEL", help="only answers of this model, in an evaluation"),
    Argument(
        "--versus",
        metavar="MODEL",
        help="compare --model with this one, or OTHER_RUN/MODEL, on the problems of both",
    ),
    Argument(
        "--solved-by",
        choices=SOLVED_BY,
        help="with --versus: show the answers to these problems (default: solved by one alone)",
    ),
    Argument("--prompt", metavar="KEY", help="only prompts whose problem begins with this key"),
    Argument(
        "--reward",
        type=_reward,
        metavar="[NAME=]SCORE",
        help="only samples with this score of a reward, or this reward",
    ),
    Argument(
        "--grep", type=_pattern, metavar="PATTERN", help="only prompts or responses that match"
    ),
    Argument("--count", type=common.positive, default=5, metavar="N", help="at most N (default 5)"),
    Argument("--tokens", action="store_true", help="show the tokens of each response"),
    Argument(
        "--waits", action="store_true", help="show what every process does, and whom it waits for"
    ),
    JSON,
)
def look(arguments: Namespace) -> None:
    """Show a run, or samples of a stage."""
    run = common.load_run(arguments)
    if (arguments.versus or arguments.solved_by) and not (arguments.model and arguments.versus):
        raise UserError("--versus compares two models: name both, with --model and --versus")
    if arguments.waits:
        found = waits(run, states_now(run))
        if arguments.json:
            print_json(arguments, {"processes": found})
        else:
            print(waits_table(found))
    elif arguments.versus:
        _show_outcomes(arguments, run)
    elif arguments.stage is None:
        if used := [name for name in SAMPLE_OPTIONS if getattr(arguments, name)]:
            raise UserError(f"--{used[0]} is about samples: name a STAGE")
        _show_run(arguments, run)
    else:
        _show_samples(arguments, run)


SAMPLE_OPTIONS = ("step", "domain", "model", "prompt", "reward", "grep", "tokens")


def _show_run(arguments: Namespace, run: Run) -> None:
    states = states_now(run)
    lines = {
        stage.name: newest_lines(run.stage(stage.name).metrics, MOST_BYTES) for stage in run.stages
    }
    found = symptoms(run, states, lines)
    if arguments.json:
        print_json(arguments, overview_json(run, states, lines, found))
        return
    print(table("", (), [[line] for line in health_lines(found)]), end="\n\n")
    left = report.estimate(run, states, took(run.events))
    print(stage_table(run, states, lines, left.seconds))


def _show_samples(arguments: Namespace, run: Run) -> None:
    # pyarrow takes a fifth of a second to import, which no other command should wait for.
    from pipeline.run.samples import Query, StageSamples, columns_of

    [stage] = run.chosen([arguments.stage])
    samples = StageSamples(run.stage(stage.name))
    found = samples.find(Query(**_asked(arguments), order=arguments.order or "first"))
    shown = [samples.whole(each) for each in islice(found, arguments.count)]
    if arguments.json:
        rows = [{**columns_of(row), "model": row["model"], "file": row["file"]} for row in shown]
        print_json(arguments, {"count": len(found), "samples": rows})
        return
    texts = _texts(run) if arguments.tokens else None
    for row in shown:
        say(*sample_lines(row))
        if texts is not None:
            print(token_table(row, texts(row["response_tokens"])))
        say("")
    more = f"; --count {len(found)} shows all" if len(found) > len(shown) else ""
    say(f"{len(shown)} of {len(found)} samples{more}")


def _asked(arguments: Namespace) -> dict[str, Any]:
    """Return what the options ask of a sample, as a Query takes it."""
    return {
        "steps": tuple(arguments.step or ()),
        "domain": arguments.domain,
        "problem": arguments.prompt,
        "model": arguments.model,
        "reward": arguments.reward,
        "grep": arguments.grep,
    }


def _show_outcomes(arguments: Namespace, run: Run) -> None:
    from pipeline.report.versus import answer_lines, outcome_table, outcomes, outcomes_json

    names = (arguments.model, arguments.versus)
    first, second = (common.measured(arguments, run, name) for name in names)
    found = outcomes(first, second, arguments.domain)
    if arguments.json:
        print_json(arguments, outcomes_json(found, names))
        return
    print(outcome_table(found, names), end="\n\n")
    kinds = [SOLVED_BY[arguments.solved_by]] if arguments.solved_by else ALONE
    problems = [
        (domain, key)
        for domain, own in found.items()
        for kind in kinds
        for key in getattr(own, kind)
    ]
    for problem in problems[: arguments.count]:
        say(*answer_lines(first, problem), *answer_lines(second, problem), "")
    say(f"{min(len(problems), arguments.count)} of {len(problems)} problems")


def _texts(run: Run) -> Callable[[list[int]], list[str]]:
    """Return the function that gives the text of each token."""
    tokenizer = load_tokenizer(run.settings.model)
    return lambda tokens: [tokenizer.decode([token]) for token in tokens]
