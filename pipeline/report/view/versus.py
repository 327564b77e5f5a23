"""Two models' answers to the same problems: both right, only one, neither, and McNemar's test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

from parallel.errors import UserError, hint
from pipeline.report.view.sample_text import KEY_DIGITS, sample_lines
from pipeline.run.answers import MeasuredModel, common_keys
from pipeline.run.samples import Query, StageSamples
from pipeline.tables import table

Problem = tuple[str, str]  # its domain and its key

RIGHT = 0.5  # share of a model's answers to a problem that must be right
KINDS = ("both", "only_first", "only_second", "neither")


@dataclass(frozen=True)
class Outcomes:
    """The keys of problems that two models were both asked, by which of them solved each."""

    both: Sequence[str]
    only_first: Sequence[str]
    only_second: Sequence[str]
    neither: Sequence[str]

    @property
    def counts(self) -> list[int]:
        """The number of problems of each kind."""
        return [len(getattr(self, kind)) for kind in KINDS]

    @property
    def p_value(self) -> float:
        """The two-sided exact test that the models solve equally many (McNemar 1947)."""
        _, only_first, only_second, _ = self.counts
        tail = sum(
            comb(only_first + only_second, wins) for wins in range(min(only_first, only_second) + 1)
        )
        return min(1.0, 2 * tail / 2 ** (only_first + only_second))


def outcomes(
    first: MeasuredModel, second: MeasuredModel, only: str | None = None
) -> dict[str, Outcomes]:
    """Return which problems each of two models solved, by domain; of one domain with `only`.

    A problem with several answers counts as solved from RIGHT of them on.

    Raises:
        UserError: they were measured on no domain in common, not on `only`, or not alike.
    """
    domains = [domain for domain in first.domains if domain in second.domains]
    if only is not None and only not in domains:
        raise UserError(f"both models were not measured on {only}; {hint(only, domains)}")
    if not domains:
        raise UserError(f"{first.name} and {second.name} were measured on no domain in common")
    by_domain = {}
    for domain in [only] if only is not None else domains:
        keys = common_keys(domain, [first, second])
        shares = [model.domains[domain].on(keys).shares for model in (first, second)]
        kinds: dict[tuple[bool, bool], list[str]] = {}
        for key, one, other in zip(keys, *shares, strict=True):
            kinds.setdefault((one >= RIGHT, other >= RIGHT), []).append(key)
        # In the order of KINDS, which are the fields of Outcomes.
        order = ((True, True), (True, False), (False, True), (False, False))
        by_domain[domain] = Outcomes(*(kinds.get(kind, []) for kind in order))
    return by_domain


def outcome_table(by_domain: dict[str, Outcomes], names: Sequence[str]) -> str:
    """Return the counts of every domain, and of all of them."""
    rows = [
        [domain, *map(str, outcome.counts), f"{outcome.p_value:.2g}"]
        for domain, outcome in by_domain.items()
    ]
    if len(by_domain) > 1:
        whole = Outcomes(
            *(
                [key for outcome in by_domain.values() for key in getattr(outcome, kind)]
                for kind in KINDS
            )
        )
        rows.append(["all", *map(str, whole.counts), f"{whole.p_value:.2g}"])
    one, other = names
    headings = ("", "both", f"only {one}", f"only {other}", "neither", "McNemar's p")
    return table("", headings, rows, right=range(1, len(headings)))


def outcomes_json(by_domain: dict[str, Outcomes], names: Sequence[str]) -> dict[str, Any]:
    """Return what `braid look --versus --json` prints."""
    domains = {
        domain: {
            **{kind: list(getattr(outcome, kind)) for kind in KINDS},
            "p_value": outcome.p_value,
        }
        for domain, outcome in by_domain.items()
    }
    return {"models": list(names), "domains": domains}


def answer_lines(model: MeasuredModel, problem: Problem, samples: StageSamples) -> Iterator[str]:
    """Yield the lines of a model's first answer in `samples` to a problem, or that it has none."""
    domain, key = problem
    try:
        matches = samples.find(Query(domain=domain, problem=key, model=model.name))
    except UserError:  # an older version recorded none
        matches = []
    if not matches:
        yield f"{model.name} · {domain} · problem {key[:KEY_DIGITS]}: its answer was not recorded"
        return
    [row] = samples.whole(matches[:1])
    yield from sample_lines(row)
