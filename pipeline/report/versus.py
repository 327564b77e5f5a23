"""Two models' answers to the same problems: both right, only one, neither, and McNemar's test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

from parallel.errors import UserError
from pipeline.report.tables import table
from pipeline.run.samples import Query, StageSamples
from stages.sampling.sample_files import Row

Problem = tuple[str, str]  # its domain and its key
RIGHT = 0.5  # share of a model's answers to a problem that must be right
HEADINGS = ("", "both", "only {}", "only {}", "neither", "McNemar's p")


@dataclass(frozen=True)
class Outcomes:
    """The problems that two models were both asked, by which of them solved each."""

    both: Sequence[Problem]
    only_first: Sequence[Problem]
    only_second: Sequence[Problem]
    neither: Sequence[Problem]

    @property
    def p_value(self) -> float:
        """The two-sided exact test that the models solve equally many (McNemar 1947)."""
        first, second = len(self.only_first), len(self.only_second)
        count = first + second
        tail = sum(comb(count, each) for each in range(min(first, second) + 1))
        return min(1.0, 2 * tail / 2**count)

    def of(self, domain: str) -> Outcomes:
        """Return those of one domain's problems."""
        kinds = (self.both, self.only_first, self.only_second, self.neither)
        return Outcomes(*([each for each in kind if each[0] == domain] for kind in kinds))


def outcomes(first: Mapping[Problem, Row], second: Mapping[Problem, Row]) -> Outcomes:
    """Return which of the problems that both models answered each of them solved.

    Raises:
        UserError: they answered no problem in common.
    """
    found: dict[tuple[bool, bool], list[Problem]] = {}
    for problem in (each for each in first if each in second):
        right = (first[problem]["right"], second[problem]["right"])
        found.setdefault(right, []).append(problem)
    if not found:
        raise UserError("the two models have no held-out problem in common")
    kinds = ((True, True), (True, False), (False, True), (False, False))
    return Outcomes(*(found.get(kind, []) for kind in kinds))


def answers(samples: StageSamples, query: Query) -> dict[Problem, Row]:
    """Return the first answer to each problem of the query's model, and if most are `right`."""
    found: dict[Problem, list[Row]] = {}
    for row in samples.find(query):
        found.setdefault((row["domain"], row["problem"]), []).append(row)
    return {
        problem: {**rows[0], "right": sum(bool(r["solved"]) for r in rows) >= RIGHT * len(rows)}
        for problem, rows in found.items()
    }


def outcome_table(found: Outcomes, names: tuple[str, str]) -> str:
    """Return the counts of every domain and of all."""
    domains = list(dict.fromkeys(domain for kind in _kinds(found) for domain, _ in kind))
    rows = [[domain, *_counts(found.of(domain))] for domain in sorted(domains)]
    if len(rows) > 1:
        rows.append(["all", *_counts(found)])
    headings = [
        heading.format(name)
        for heading, name in zip(HEADINGS, ("", "", *names, "", ""), strict=True)
    ]
    return table("", headings, rows, right=range(1, len(HEADINGS)))


def outcomes_json(found: Outcomes, names: tuple[str, str]) -> dict[str, Any]:
    """Return what `braid look --versus --json` prints."""
    domains = sorted({domain for kind in _kinds(found) for domain, _ in kind})
    return {
        "models": list(names),
        "domains": {
            domain: {
                **dict(zip(KINDS, map(len, _kinds(own := found.of(domain))), strict=True)),
                "p_value": own.p_value,
            }
            for domain in domains
        },
        **{name: [key for _, key in kind] for name, kind in zip(KINDS, _kinds(found), strict=True)},
    }


KINDS = ("both", "only_first", "only_second", "neither")


def _kinds(found: Outcomes) -> tuple[Sequence[Problem], ...]:
    return tuple(getattr(found, name) for name in KINDS)


def _counts(found: Outcomes) -> list[str]:
    return [*(str(len(kind)) for kind in _kinds(found)), f"{found.p_value:.2g}"]
