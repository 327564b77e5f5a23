"""What `braid domain check --run` shows: what a checkpoint's responses earn, and teach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from pipeline.report.tables import plain_table

EXAMPLES, CHARACTERS = 5, 60  # responses that are shown, and the most of each
BINS, WIDTH = 10, 40  # lines of a histogram, and characters of its longest bar

Groups = list[list[dict[str, Any]]]


def examples(groups: Groups) -> Table:
    """The first response to each of the first prompts, and what it earned."""
    table = plain_table("responses")
    shown = [group[0] for group in groups[:EXAMPLES]]
    names = list(dict.fromkeys(name for sample in shown for name in sample["parts"] or {}))
    for heading in ("prompt", "response", *names, "reward"):
        table.add_column(heading)
    for sample in shown:
        parts = [_number((sample["parts"] or {}).get(name)) for name in names]
        texts = [short(sample["prompt"]), short(sample["response"])]
        table.add_row(*map(Text, (*texts, *parts, _number(sample["reward"]))))
    return table


def short(text: str) -> str:
    """Text as a literal on one line, its middle left out where it is long."""
    half = CHARACTERS // 2
    return repr(text if len(text) <= CHARACTERS else f"{text[:half]} … {text[-half:]}")


def lines(groups: Groups, failures: list[str], watch_failures: list[str]) -> Iterator[str]:
    """What the groups teach, in words."""
    samples = [sample for group in groups for sample in group]
    graded = [_earned(group) for group in groups]
    flat = [group for group, earned in zip(groups, graded, strict=True) if len(set(earned)) <= 1]
    right = sum(all(sample["solved"] for sample in group) for group in flat)
    wrong = sum(not any(sample["solved"] for sample in group) for group in flat)
    truncated = sum(not sample["finished"] for sample in samples)
    tokens = sum(sample["tokens"] for sample in samples)
    yield f"{len(samples)} responses to {len(groups)} prompts"
    yield (
        f"  groups that teach nothing, since all earned the same: {_share(len(flat), len(groups))}"
    )
    yield (f"    all right: {_share(right, len(groups))}; all wrong: {_share(wrong, len(groups))}")
    yield f"  cut off at sampling.max_response_tokens: {_share(truncated, len(samples))}"
    yield f"  tokens of a response: {tokens / len(samples):.1f} on average"
    if failures:
        yield f"  without a reward: {_share(len(failures), len(samples))}; the first: {failures[0]}"
    if watch_failures:
        yield f"  a reward of weight 0 failed {len(watch_failures)} times: {watch_failures[0]}"


def histograms(groups: Groups) -> Iterator[Table]:
    """Of the sum of all rewards and of each of them, how many responses earned how much."""
    samples = [each for group in groups for each in group if each["reward"] is not None]
    named: dict[str, list[float]] = {"reward": [sample["reward"] for sample in samples]}
    for sample in samples:
        for name, value in sample["parts"].items():
            named.setdefault(f"reward/{name}", []).append(value)
    for name, values in named.items():
        if values:
            yield histogram(name, values)


def histogram(name: str, values: list[float]) -> Table:
    """A line for each value, or for each of `BINS` ranges of equal width where there are more."""
    table = plain_table(f"{name}: {sum(values) / len(values):.4g} on average")
    table.show_header = False
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    counts = binned(values)
    for label, count in counts.items():
        bar = "█" * round(WIDTH * count / max(counts.values()))
        table.add_row(label, _share(count, len(values)), bar)
    return table


def binned(values: list[float]) -> dict[str, int]:
    """How many values there are by what they are, from the lowest to the highest."""
    if len(single := Counter(values)) <= BINS:
        return {f"{value:g}": single[value] for value in sorted(single)}
    lowest, highest = min(values), max(values)
    width = (highest - lowest) / BINS
    counts = Counter(min(int((value - lowest) / width), BINS - 1) for value in values)
    edges = [lowest + width * place for place in range(BINS + 1)]
    return {f"{edges[b]:.3g} to {edges[b + 1]:.3g}": counts[b] for b in range(BINS)}


def _number(value: float | None) -> str:
    return "failed" if value is None else f"{value:g}"


def _earned(group: list[dict[str, Any]]) -> list[float]:
    return [sample["reward"] for sample in group if sample["reward"] is not None]


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %"
