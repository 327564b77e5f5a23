"""Samples one below the other, as `braid look` prints them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import zip_longest
from typing import Any

from pipeline.report.sample_text import (
    grade_lines,
    regraded_line,
    route_table,
    sample_lines,
    token_table,
)
from pipeline.report.versus import Outcomes, answer_lines, outcome_table
from pipeline.run.answers import MeasuredModel
from pipeline.run.run import Run
from pipeline.run.samples import StageSamples, columns_of
from pipeline.text import say
from stages.data.tokenizer import load_tokenizer
from stages.sampling.sample_files import Row


def print_samples(
    run: Run,
    samples: StageSamples,
    found: Sequence[Row],
    shown: Sequence[Row],
    grades: Sequence[dict[str, Any]],
    tokens: bool,
    routes: bool,
) -> None:
    """Print `shown`, the first of the samples found, each with its grade of now if there are any.

    Raises:
        UserError: a file is damaged, or there is no tokenizer for `tokens` or `routes`.
    """
    texts = _texts(run) if tokens or routes else None
    for place, row, grade in zip_longest(found[: len(shown)], shown, grades):
        say(*sample_lines(row))
        if grade is not None:
            say(*grade_lines(grade))
        if tokens and texts is not None:
            print(token_table(row, texts(row["response_tokens"])))
        if routes and texts is not None:
            print(route_table(samples.routes(place), texts(row["response_tokens"])))
        say("")
    if grades:
        say(regraded_line(shown, grades))
    if not found:
        say(f"none of {samples.count} samples is like that")
        return
    more = f"; --count {len(found)} shows all" if len(found) > len(shown) else ""
    say(f"{len(shown)} of {len(found)} samples{more}")


def samples_json(shown: Sequence[Row], grades: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the columns of samples, with `graded_now` of those that were graded again."""
    return [
        {**columns_of(row), "model": row["model"], "file": row["file"]}
        | ({} if grade is None else {"graded_now": grade})
        for row, grade in zip_longest(shown, grades)
    ]


def print_outcomes(
    models: Sequence[MeasuredModel],
    names: Sequence[str],
    found: dict[str, Outcomes],
    kinds: Sequence[str],
    count: int,
) -> None:
    """Print who solves what, and both models' answers to `count` problems of some kinds."""
    print(outcome_table(found, names), end="\n\n")
    problems = [
        (domain, key)
        for domain, own in found.items()
        for kind in kinds
        for key in getattr(own, kind)
    ]

    @cache  # once for all problems of an evaluation
    def answers(model: int, domain: str) -> StageSamples:
        measured = models[model]
        return StageSamples(measured.run.stage(measured.domains[domain].evaluation))

    for problem in problems[:count]:
        for number, model in enumerate(models):
            say(*answer_lines(model, problem, answers(number, problem[0])))
        say("")
    say(f"{min(len(problems), count)} of {len(problems)} problems")


def _texts(run: Run) -> Callable[[list[int]], list[str]]:
    """Return the function that gives the text of each token."""
    tokenizer = load_tokenizer(run.settings.model)
    return lambda tokens: [tokenizer.decode([token]) for token in tokens]
