"""The samples of a run as the columns of its report: few bytes each, texts once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import isfinite
from random import SystemRandom
from typing import Any

from parallel.errors import UserError
from pipeline.run.run import Run
from pipeline.run.samples import StageSamples
from stages.sampling.sample_files import Row

Json = dict[str, Any]

PLAIN = ("step", "group", "tokens", "reward", "advantage", "staleness", "update")
TEXTS = ("prompt", "answer", "response", "reward_failure")  # --redact leaves them out
NAMED = ("domain", "problem", "model", "finish_reason", *TEXTS)
OF_TOKENS = ("logprobs", "trainer_logprobs", "entropies", "advantages", "teacher_kl", "learned")
MOST_WITH_TOKENS = 2000  # samples of a stage whose tokens' values are in the report
DIGITS_OF_RECORDED = 8  # of a problem's key, which decide: stages/sampling/recording.py
DIGITS = 7  # of a token's values: engine and trainer differ in the last ones


class Names:
    """The distinct values of a column, which the column names by their number."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def number(self, value: Any) -> int | None:
        """Return the number of a value; None of None."""
        if value is None:
            return None
        if value not in self._numbers:
            self._numbers[value] = len(self.values)
            self.values.append(value)
        return self._numbers[value]


class Recorded:
    """The samples of all stages of a run, at most `most` of them.

    Of more, all samples of some prompts are kept, so that groups, a prompt's history and two
    models' answers to a problem stay whole. The prompts are the same in all stages, and first those
    whose tokens' values are recorded.
    """

    def __init__(self, run: Run, redacted: bool, most: int) -> None:
        self._redacted = redacted
        self.damaged: list[str] = []  # what could not be read
        self._stages: dict[str, StageSamples] = {}
        self._problems: dict[str, Counter[str | None]] = {}
        for stage in run.stages:
            with self._noting():
                samples = StageSamples(run.stage(stage.name))
                if samples.files:
                    self._problems[stage.name] = samples.problems
                    self._stages[stage.name] = samples
        # The keys are hashes of the prompts: which ones are kept must not say their last digits.
        order = (lambda _: SystemRandom().random()) if redacted else recorded_first
        self._chosen = chosen_problems(self._problems.values(), most, order)

    def tables(self) -> dict[str, Json]:
        """Return the samples of every stage that has some, by its name.

        `of` is how many the stage recorded, and `prompts` of how many prompts some are not here.
        """
        tables = {}
        for name, samples in self._stages.items():
            problems = self._problems[name]
            left_out = 0 if self._chosen is None else len(problems.keys() - set(self._chosen))
            about = {"of": problems.total(), "prompts": len(problems), "left_out": left_out}
            with self._noting():
                tables[name] = self._table(samples) | about
            self.damaged += samples.damaged
        return tables

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Note what cannot be read: damaged, or taken away by a stage that was resumed."""
        try:
            yield
        except UserError as error:
            self.damaged.append(str(error))

    def _table(self, samples: StageSamples) -> Json:
        left_out = set(TEXTS) if self._redacted else set()
        names = {name: Names() for name in NAMED if name not in left_out}
        reward_parts: dict[str, list[float | None]] = {}
        columns: dict[str, list[Any]] = {
            name: [] for name in (*PLAIN, *names, "solved", "messages")
        }
        tokens: dict[int, Json] = {}
        seen, every = 0, 1  # samples with tokens' values, and which of them are kept
        for place, row in enumerate(samples.rows(self._chosen)):
            for name in PLAIN:
                columns[name].append(short_number(row[name], 6))
            for name, distinct in names.items():
                columns[name].append(distinct.number(row[name]))
            solved = row["solved"]
            columns["solved"].append(None if solved is None else int(solved))
            columns["messages"].append(None if left_out else row["reward_messages"])
            for name, score in (row["reward_parts"] or {}).items():
                column = reward_parts.setdefault(name, [])
                column += [None] * (place - len(column))
                column.append(short_number(score, 6))
            observed = row["trainer_logprobs"] or row["teacher_kl"]
            if observed and not self._redacted:
                if seen % every == 0:
                    tokens[place] = _of_tokens(row)
                seen += 1
                if len(tokens) > MOST_WITH_TOKENS:  # keep them spread over all steps
                    tokens, every = dict(list(tokens.items())[::2]), 2 * every
        count = len(columns["step"])
        for column in reward_parts.values():
            column += [None] * (count - len(column))
        return {
            "columns": columns,
            "names": {name: distinct.values for name, distinct in names.items()},
            "parts": reward_parts,
            "tokens": tokens,
            "with_tokens": seen,
        }


def recorded_first(problem: str) -> str:
    """Return what problems are sorted by, so that those come first whose tokens are recorded."""
    return problem[-DIGITS_OF_RECORDED:]


def chosen_problems(
    stages: Iterable[Counter[str | None]],
    most: int,
    order: Callable[[str], str | float] = recorded_first,
) -> list[str] | None:
    """Return the problems whose samples are at most `most` in all; None where all samples are.

    They are the first in an order, as `sorted` takes one.
    """
    counts: Counter[str | None] = Counter()
    for problems in stages:
        counts += problems
    if counts.total() <= most:
        return None
    keys: list[str] = []
    for problem in sorted((key for key in counts if key), key=order):
        most -= counts[problem]
        if most < 0 and keys:
            break
        keys.append(problem)
    return keys


def _of_tokens(row: Row) -> Json:
    """Return the values of a sample's tokens that were recorded, and the tokens' ids."""
    tokens: Json = {"ids": row["response_tokens"]}
    for name in OF_TOKENS:
        if row[name] is not None:
            tokens[name] = [short_number(value, DIGITS) for value in row[name]]
    return tokens


def short_number(value: float | None, digits: int) -> float | None:
    """Return a number in few digits; none where it is no number, which JSON lacks."""
    return float(f"{value:.{digits}g}") if value is not None and isfinite(value) else None
