"""The samples that `braid look` prints, and the options that choose them."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from itertools import islice
from math import isfinite
from typing import Any

from pipeline.commands import common
from pipeline.commands.common import Argument, Arguments, print_json
from pipeline.launch.regrade import regrade
from pipeline.report.sample_text import grade_lines, route_table, sample_lines, token_table
from pipeline.run.run import Run
from pipeline.text import say
from stages.data.tokenizer import load_tokenizer

COUNT = 5  # samples that are shown
SAMPLE_OPTIONS = (
    *("step", "domain", "model", "prompt", "reward", "finish", "grep", "order", "count"),
    *("tokens", "routes", "grade"),
)
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


SAMPLE_ARGUMENTS: Arguments = (
    (
        _order("worst", "lowest reward first, the newest of these first"),
        _order("longest", "most tokens first"),
        _order("flipped", "prompts right in their first step and wrong in their last, or back"),
    ),
    Argument("--step", type=common.positive, action="append", metavar="N", help="only this step"),
    Argument("--domain", metavar="DOMAIN", help="only this domain"),
    Argument("--model", metavar="MODEL", help="only answers of this model, in an evaluation"),
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
    Argument("--finish", choices=("stop", "length"), help="only samples that ended so"),
    Argument("--count", type=common.positive, metavar="N", help="at most N (default 5)"),
    Argument("--tokens", action="store_true", help="show the tokens of each response"),
    Argument(
        "--routes",
        action="store_true",
        help="show the experts of each token, where they are recorded (logging.auditable)",
    ),
    Argument(
        "--grade",
        action="store_true",
        help="grade them again, by the run's rewards as they are now",
    ),
)


def show_samples(arguments: Namespace, run: Run) -> None:
    """Print the samples of a stage that the options ask for."""
    # pyarrow takes a fifth of a second to import, which no other command should wait for.
    from pipeline.run.samples import Query, StageSamples, columns_of

    samples = StageSamples(run.stage(arguments.stage))
    found = samples.find(Query(**_asked(arguments), order=arguments.order or "first"))
    chosen = [*islice(found, arguments.count)]
    shown = [samples.whole(each) for each in chosen]
    grades: list[Any] = [None] * len(shown)
    if arguments.grade:
        grades = regrade(run, arguments.stage, shown, arguments.trust_run)
    if arguments.json:
        rows = [
            {**columns_of(row), "model": row["model"], "file": row["file"]}
            | ({"graded_now": grade} if grade else {})
            for row, grade in zip(shown, grades, strict=True)
        ]
        print_json(arguments, {"count": len(found), "samples": rows})
        return
    texts = _texts(run) if arguments.tokens or arguments.routes else None
    for place, row, grade in zip(chosen, shown, grades, strict=True):
        say(*sample_lines(row))
        if grade is not None:
            say(*grade_lines(grade))
        if arguments.tokens and texts is not None:
            print(token_table(row, texts(row["response_tokens"])))
        if arguments.routes and texts is not None:
            print(route_table(samples.routes(place), texts(row["response_tokens"])))
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
        "finish": arguments.finish,
        "grep": arguments.grep,
    }


def show_outcomes(arguments: Namespace, run: Run) -> None:
    """Print who solves what, of two models, and the answers to some of these problems."""
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
