"""The comparison of a run's models as tables, as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.report.compare.comparison import ComparedModel, DomainScore, ModelComparison
from pipeline.report.compare.stage_costs import StageCost
from pipeline.report.status import OWN_DOMAIN
from pipeline.tables import Cell, markdown_table, wrapped_table
from pipeline.text import clock, human, visible
from stages.statistics import Difference, Headroom

LOST, GAINED = "▼", "▲"  # where the whole interval is below 0, or above
UNDEFINED = "-"
COST_HEADINGS = ("stage", "kind", "sampled tokens", "trained tokens", "time", "memory", "on GPU")


@dataclass(frozen=True)
class Section:
    """A table of a comparison, and the lines below it; without headings the title is a line."""

    title: str
    headings: Sequence[str] = ()
    rows: Sequence[Sequence[str | Cell]] = ()
    right: Sequence[int] = ()
    below: Sequence[str] = ()


def comparison_text(comparison: ModelComparison, markdown: bool = False) -> str:
    """Return the tables for a terminal, at most 100 columns wide where their cells allow it."""
    write = markdown_table if markdown else wrapped_table
    texts = []
    for section in _sections(comparison):
        below = [f"{visible(line)}" for line in section.below]
        lines = [f"- {line}" for line in below] if markdown else below
        text = visible(section.title)
        if section.headings:
            text = write(section.title, section.headings, section.rows, section.right)
        texts.append("\n".join([text, *([""] if markdown and lines else []), *lines]))
    notes = [f"{'- ' * markdown}{visible(note)}" for note in comparison.notes]
    return "\n\n".join([*texts, *(["\n".join(notes)] if notes else [])])


def _sections(comparison: ModelComparison) -> Iterator[Section]:
    domains = list(comparison.problems)
    headings, right = ("model", *domains), range(1, len(domains) + 1)
    rows: list[list[str | Cell]] = [
        [name, *(_accuracy_cell(model, domain) for domain in domains)]
        for name, model in comparison.models.items()
    ]
    title = (
        f"accuracy in %, and change against {comparison.start} in points with paired 95 % intervals"
    )
    marked = any(model.expert_of for model in comparison.models.values())
    below = [f"{OWN_DOMAIN} marks an expert's own domain"] if marked else []
    below.append(_problems_line(comparison))
    yield Section(title, headings, rows, right, below)
    yield from _headroom(comparison, domains)
    yield from _forgetting(comparison, domains)
    costs = [*map(_cost_row, comparison.costs), _total_row(comparison.costs)]
    columns = len(COST_HEADINGS) - (not costs[-1][-1])  # without GPUs no column of their memory
    yield Section(
        "cost of the stages: time of all attempts, most memory of a rank",
        COST_HEADINGS[:columns],
        [row[:columns] for row in costs],
        range(2, columns),
    )


def _headroom(comparison: ModelComparison, domains: Sequence[str]) -> Iterator[Section]:
    """Yield the table of recovered headroom, unless there is none at all."""
    below = [f"no headroom on {domain}: {why}" for domain, why in comparison.undefined.items()]
    rows = [
        [
            name,
            _headroom_text(model.mean_headroom),
            f"{min(headroom.recovered for headroom in model.headrooms.values()):.2f}",
            *(_headroom_text(model.headrooms.get(domain)) for domain in domains),
        ]
        for name, model in comparison.models.items()
        if model.role != "start" and model.headrooms
    ]
    title = (
        f"headroom recovered: 0 is {comparison.start}, 1 the domain's expert; with 95 % intervals"
    )
    headings = ("model", "mean", "least", *domains)
    if rows:
        yield Section(title, headings, rows, range(1, len(headings)), below)
    else:
        yield Section("no headroom on any domain", below=below)


def _forgetting(comparison: ModelComparison, domains: Sequence[str]) -> Iterator[Section]:
    """Yield the table of what models lost or gained where they were not trained."""
    rows: list[list[str | Cell]] = [
        [
            name,
            _points(min(model.forgetting.values(), key=lambda change: change.difference)),
            *(_change_cell(model.forgetting.get(domain)) for domain in domains),
        ]
        for name, model in comparison.models.items()
        if model.forgetting
    ]
    if rows:
        title = f"change against {comparison.start} on domains not trained on, in points"
        headings = ("model", "least", *domains)
        below = [f"{LOST} the whole 95 % interval is below 0, {GAINED} above"]
        yield Section(title, headings, rows, range(1, len(headings)), below)


def _accuracy_cell(model: ComparedModel, domain: str) -> Cell:
    score: DomainScore | None = model.scores.get(domain)
    if score is None:
        return Cell("")
    text = f"{100 * score.accuracy.accuracy:.1f}"
    if (change := score.change) is not None:
        text += f" {_points(change):>5} ± {50 * (change.high - change.low):.1f}"
    is_own = domain in model.expert_of
    return Cell(f"{OWN_DOMAIN} {text}", "bold") if is_own else Cell(text)


def _change_cell(change: Difference | None) -> Cell:
    if change is None:
        return Cell("")
    if change.high < 0:
        return Cell(f"{_points(change)} {LOST}", "red")
    return Cell(f"{_points(change)} {GAINED if change.low > 0 else ' '}")


def _points(change: Difference) -> str:
    return f"{100 * change.difference:+.1f}"


def _headroom_text(headroom: Headroom | None) -> str:
    if headroom is None:
        return UNDEFINED
    if headroom.high - headroom.low < 5e-7:  # the expert itself, but for rounding
        return f"{headroom.recovered:.2f}"
    return f"{headroom.recovered:.2f} [{headroom.low:.2f}, {headroom.high:.2f}]"


def _problems_line(comparison: ModelComparison) -> str:
    """Return the number of problems, once where all domains have the same."""
    counts = set(comparison.problems.values())
    if len(counts) == 1:
        return f"{counts.pop()} problems of each domain, the same for all models"
    by_domain = ", ".join(f"{count} of {domain}" for domain, count in comparison.problems.items())
    return f"problems, the same for all models: {by_domain}"


def _cost_row(cost: StageCost) -> list[str]:
    return [
        cost.stage,
        cost.kind,
        _count(cost.sampled_tokens),
        _count(cost.trained_tokens),
        "" if cost.minutes is None else clock(60 * cost.minutes),
        human(cost.peak_bytes) if cost.peak_bytes else "",
        human(cost.peak_gpu_bytes) if cost.peak_gpu_bytes else "",
    ]


def _total_row(costs: Sequence[StageCost]) -> list[str]:
    """Return the sums and the largest memory; a sum of what was recorded."""
    sampled, trained = (
        [value for cost in costs if (value := getattr(cost, name)) is not None]
        for name in ("sampled_tokens", "trained_tokens")
    )
    total = StageCost(
        "total",
        "",
        sum(sampled) if sampled else None,
        sum(trained) if trained else None,
        sum(cost.minutes or 0.0 for cost in costs),
        max((cost.peak_bytes or 0 for cost in costs), default=0),
        max((cost.peak_gpu_bytes or 0 for cost in costs), default=0),
    )
    return _cost_row(total)


def _count(tokens: int | None) -> str:
    return "" if tokens is None else f"{tokens:,}"
