"""A run as a row of the table of `braid runs`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import hypot
from statistics import fmean

from parallel.errors import UserError
from pipeline.report.compare.comparison import ModelComparison, compare
from pipeline.run.answers import measured_models
from pipeline.run.leftovers import size_of
from pipeline.run.run import Run
from pipeline.slurm.queue import states_now
from pipeline.tables import STATE_STYLES, Cell, table
from pipeline.text import human

HEADINGS = ("run", "begun", "changed", "state", "size", "outcome")
# A run is what its first stage here is, where it has one in this state.
TELLING = ("failed", "running", "submitted", "stale", "pending", "done")
MINUTES = len("2026-11-28T07:49")


@dataclass(frozen=True)
class ListedRun:
    """A run's dates (UTC), states, bytes on disk and outcome; of an unreadable one the `error`.

    `accuracy`, `change` against the start and `half_width` of its 95 % interval are fractions,
    means over `domains` domains; None where nothing was measured, or the model is the start.
    """

    name: str
    path: str
    begun: str | None = None
    changed: str | None = None
    states: Mapping[str, int] = field(default_factory=dict)
    bytes: int | None = None
    model: str | None = None
    accuracy: float | None = None
    change: float | None = None
    half_width: float | None = None
    domains: int = 0
    error: str | None = None

    @property
    def outcome(self) -> str:
        """The model measured last, its accuracy and change in percent and points."""
        if self.accuracy is None:
            return ""
        of = f" over {self.domains} domains" if self.domains > 1 else ""
        text = f"{self.model} {100 * self.accuracy:.1f} %{of}"
        if self.change is None or self.half_width is None:
            return text
        return f"{text}, {100 * self.change:+.1f} ± {100 * self.half_width:.1f} points"


def list_run(run: Run) -> ListedRun:
    """Return a run's row; raise UserError or OSError where it cannot be read."""
    states: Counter[str] = Counter(state.state for state in states_now(run).values())
    times = sorted(event.time for event in run.events)
    size = size_of(run.path)
    begun, changed = (times[0], times[-1]) if times else (None, None)
    row = ListedRun(run.name, str(run.path), begun, changed, dict(states), size)
    try:
        comparison = compare(run, measured_models(run))
    except (UserError, OSError):  # nothing measured, or nothing to compare
        return row
    return _with_outcome(row, comparison)


def _with_outcome(row: ListedRun, comparison: ModelComparison) -> ListedRun:
    models = comparison.models
    merges = [name for name, model in models.items() if model.role == "merge"]
    name = [*models, *merges][-1]
    model = models[name]
    changes = [score.change for score in model.scores.values() if score.change]
    accuracy = fmean(score.accuracy.accuracy for score in model.scores.values())
    row = replace(row, model=name, accuracy=accuracy, domains=len(model.scores))
    if not changes:
        return row
    widths = ((change.high - change.low) / 2 for change in changes)
    mean = fmean(change.difference for change in changes)
    return replace(row, change=mean, half_width=hypot(*widths) / len(changes))


def run_table(runs: Sequence[ListedRun]) -> str:
    """Return the table of runs, a line each."""
    return table("", HEADINGS, [_cells(run) for run in runs], right=(4,))


def _cells(run: ListedRun) -> list[str | Cell]:
    if run.error is not None:
        return [run.name, "", "", Cell("unreadable", "red"), "", ""]
    telling = next((state for state in TELLING if state in run.states), "")
    states = ", ".join(f"{count} {state}" for state, count in run.states.items())
    return [
        run.name,
        *(_date(time) for time in (run.begun, run.changed)),
        Cell(states, STATE_STYLES.get(telling, "")),
        human(run.bytes or 0),
        run.outcome,
    ]


def _date(time: str | None) -> str:
    return "" if time is None else time[:MINUTES].replace("T", " ")
