"""Samples one below the other, as `braid look` prints them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from typing import Any

from pipeline.report.view.sample_text import (
    Grade,
    grade_lines,
    regraded_line,
    route_table,
    sample_lines,
    token_table,
)
from pipeline.report.view.versus import Outcomes, answer_lines, outcome_table
from pipeline.run.answers import MeasuredModel
from pipeline.run.run import Run
from pipeline.run.samples import StageSamples, columns_of
from pipeline.text import say
from stages.data.tokenizer import tokenizer_named
from stages.sampling.sample_files import Row


@dataclass(frozen=True)
class Listing:
    """Samples that were found, those of them that are shown, and what these would earn now."""

    matches: Sequence[Row]
    shown: Sequence[Row]
    grades: Sequence[Grade] = ()  # of those shown, where they were graded again
    graded: str | None = None  # how the rewards of all that were graded again changed

    @classmethod
    def of(
        cls,
        samples: StageSamples,
        matches: Sequence[Row],
        count: int,
        regrade: Callable[[Sequence[Row]], list[Grade]] | None = None,
        changed: bool = False,
    ) -> Listing:
        """Read the first `count` of the samples found, and grade them again by `regrade`.

        With `changed` all that were found are graded, and those are kept whose reward is another.
        """
        rows = samples.whole(matches if changed else matches[:count])
        if regrade is None or not rows:
            return cls(matches, rows)
        grades = regrade(rows)
        summary = regraded_line(rows, grades)
        if changed:
            pairs = enumerate(zip(rows, grades, strict=True))
            places = [place for place, (row, grade) in pairs if grade["reward"] != row["reward"]]
            matches = [matches[place] for place in places]
            rows, grades = (
                [series[place] for place in places[:count]] for series in (rows, grades)
            )
        return cls(matches, rows, grades, summary)


def print_samples(
    run: Run, samples: StageSamples, listing: Listing, tokens: bool, routes: bool
) -> None:
    """Print the samples of a listing, each with its grade of now if there are any.

    Raises:
        UserError: a file is damaged, or there is no tokenizer for `tokens` or `routes`.
    """
    matches, shown = listing.matches, listing.shown
    texts = _texts(run) if tokens or routes else None
    for place, row, grade in zip_longest(matches[: len(shown)], shown, listing.grades):
        say(*sample_lines(row))
        if grade is not None:
            say(*grade_lines(grade))
        if tokens and texts is not None:
            print(token_table(row, texts(row["response_tokens"])))
        if routes and texts is not None:
            print(route_table(samples.routes(place), texts(row["response_tokens"])))
        say("")
    if listing.graded is not None:
        say(listing.graded)
    elif not matches:
        say(f"none of {samples.count} samples is like that")
    if matches:
        more = f"; --count {len(matches)} shows all" if len(matches) > len(shown) else ""
        say(f"{len(shown)} of {len(matches)} samples{more}")


def listing_json(samples: StageSamples, listing: Listing, routes: bool) -> dict[str, Any]:
    """Return what `braid look STAGE --json` prints.

    `graded_now` is of samples that were graded again, `routes` by token and layer.
    """
    rows = []
    places = listing.matches[: len(listing.shown)]
    for place, row, grade in zip_longest(places, listing.shown, listing.grades):
        sample = {**columns_of(row), "model": row["model"], "file": row["file"]}
        sample |= {} if grade is None else {"graded_now": grade}
        sample |= {"routes": samples.routes(place)} if routes else {}
        rows.append(sample)
    return {"count": len(listing.matches), "samples": rows}


def print_outcomes(
    models: Sequence[MeasuredModel],
    names: Sequence[str],
    by_domain: dict[str, Outcomes],
    kinds: Sequence[str],
    count: int,
) -> None:
    """Print who solves what, and both models' answers to `count` problems of some kinds."""
    print(outcome_table(by_domain, names), end="\n\n")
    problems = [
        (domain, key)
        for domain, outcomes in by_domain.items()
        for kind in kinds
        for key in getattr(outcomes, kind)
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
    tokenizer = tokenizer_named(run.settings.model.tokenizer)
    return lambda tokens: [tokenizer.decode_prompt([token]) for token in tokens]
