"""What a domain's prompts are like before anything is trained on them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stages.data.problem import Problem
from stages.data.prompts import split_of
from stages.data.reasoning_gym_source import ReasoningGymSource
from stages.data.sources.prompt_rows import problem_at, prompt_index
from stages.data.sources.settings import PromptSettings, ReasoningGymPromptSettings
from stages.data.tokenizer import Tokenizer

PERCENTILES = (0, 50, 90, 95, 99, 100)
DRAWN = 10_000  # problems of a source without end


@dataclass(frozen=True)
class LengthReport:
    """Counts of rows, and of the distinct usable prompts among them, and how long those are.

    `too_long` have more than `max_prompt_tokens`; `tokens` maps each of `PERCENTILES` to a prompt's
    tokens.
    """

    rows: int
    bad: int
    duplicates: int
    prompts: int
    held_out: int
    for_gates: int
    too_long: int
    tokens: dict[int, int]


def length_report(
    settings: PromptSettings, tokenizer: Tokenizer, domain: str, drawn: int = DRAWN
) -> LengthReport:
    """Of all rows of the domain's files, or of so many problems of a source without end.

    Reads one row at a time. Raises DomainError and TokenizerError as the domain's streams do.
    """
    if isinstance(settings, ReasoningGymPromptSettings):
        problems = _distinct(ReasoningGymSource(settings, domain, seed=0), drawn)
        rows, bad, limit = drawn, 0, None
    else:
        index = prompt_index(settings, domain)
        places = range(len(index.keys))
        problems = (problem_at(index, settings, tokenizer, row, row) for row in places)
        rows, bad, limit = index.counts.rows, index.counts.bad, settings.max_prompt_tokens
    lengths, splits = array("L"), Counter[str]()
    for problem in problems:
        lengths.append(len(tokenizer.encode(problem.prompt)))
        splits[split_of(problem, settings.held_out_fraction)] += 1
    counts = np.frombuffer(lengths, np.dtype(f"u{lengths.itemsize}"))
    found = np.percentile(counts, PERCENTILES, method="higher").tolist()
    return LengthReport(
        rows=rows,
        bad=bad,
        duplicates=rows - bad - len(counts),
        prompts=len(counts),
        held_out=splits["held_out"],
        for_gates=splits["gate"],
        too_long=0 if limit is None else int((counts > limit).sum()),
        tokens=dict(zip(PERCENTILES, found, strict=True)),
    )


def _distinct(source: ReasoningGymSource, drawn: int) -> Iterator[Problem]:
    seen: set[str] = set()
    for index in range(drawn):
        problem = source.problem(index)
        if problem.key not in seen:
            seen.add(problem.key)
            yield problem
