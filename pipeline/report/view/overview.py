"""The overview of a run: its health, and a line of each stage with its curve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import isfinite
from statistics import fmean
from typing import Any

from parallel.errors import UserError, hint
from pipeline.report.drawing import tree
from pipeline.report.time_left import estimate
from pipeline.report.view.findings import Health, StageVerdict
from pipeline.run.graph import Stage
from pipeline.run.ledger import took
from pipeline.run.metrics import NOT_METRICS, Line, newest_lines, series
from pipeline.run.run import Run, StageState
from pipeline.slurm.queue import states_now
from pipeline.tables import STATE_STYLES, Cell, table
from pipeline.text import clock
from stages.metric_definitions import METRICS, declared_as
from stages.metric_ranges import LAST_STEPS
from stages.statistics import fitted_rise

MOST_BYTES = 1 << 26  # of a stage's metrics that are read, from their end
BARS = "▁▂▃▄▅▆▇█"
WIDTH = 16  # bars of a curve
ACCURACY = "accuracy"
LABELLED = {"model", "domain", ACCURACY}  # in a line of an evaluation
# The first that a stage logs is its curve.
CURVES = (ACCURACY, "teacher_kl", "reward", "kept", "loss")
# Parts of a step, by the metric of their seconds.
SECONDS = {
    "rollout": "seconds_rollout",
    "train": "seconds_train",
    "refit": "seconds_refit",
    "engine start": "seconds_start",
    "offload": "seconds_offload",
    "wake": "seconds_wake",
}
HEADINGS = ("stage", "state", "steps", "curve", "", "tokens/s", "where a step's seconds go", "left")


def health_lines(health: Health) -> Iterator[Cell]:
    """Yield a line for each finding, then for each other stage what it learned, and why so."""
    for symptom in health.symptoms:
        yield Cell(
            f"{'!' if symptom.alarm else '·'} {symptom}", "red" if symptom.alarm else "yellow"
        )
    if health.is_well:
        yield Cell("✓ nothing is out of its range", "green")
    said = {symptom.stage for symptom in health.symptoms if symptom.word}
    for verdict in health.verdicts:
        if verdict.stage not in said:
            yield verdict_line(verdict)


def verdict_line(verdict: StageVerdict) -> Cell:
    """Return the line of a verdict: what a stage did to its model, and the evidence."""
    if verdict.is_good:
        return Cell(f"✓ {verdict}", "green")
    return Cell(f"! {verdict}", "red") if verdict.alarm else Cell(f"· {verdict}", "yellow")


@dataclass(frozen=True)
class Overview:
    """A run as it stands: its stages' states, metrics, and seconds left where they are known."""

    run: Run
    states: Mapping[str, StageState]
    lines: Mapping[str, Sequence[Line]]
    left: Mapping[str, float | None]

    @classmethod
    def of(cls, run: Run) -> Overview:
        """Read a run's files."""
        states = states_now(run)
        lines = {
            stage.name: newest_lines(run.stage(stage.name).metrics, MOST_BYTES)
            for stage in run.stages
        }
        return cls(run, states, lines, estimate(run, states, took(run.events)).seconds)

    @property
    def is_running(self) -> bool:
        """True where a stage is running or in a queue."""
        return any(state.state in ("running", "submitted") for state in self.states.values())

    @property
    def progress(self) -> list[tuple[str, int]]:
        """Every stage's state and its newest step, or 0."""
        return [
            (state.state, lines[-1]["step"] if (lines := self.lines.get(name)) else 0)
            for name, state in self.states.items()
        ]

    def rows(self) -> Iterator[tuple[str, list[str | Cell]]]:
        """Yield every stage's name and cells, as a tree, under HEADINGS."""
        stages = {stage.name: stage for stage in self.run.stages}
        for name, branch in tree(self.run.stages).items():
            lines = self.lines.get(name, ())
            yield name, [branch, *_cells(stages[name], self.states[name], lines, self.left[name])]


def stage_table(overview: Overview) -> str:
    """Return the table of a run's stages."""
    title = f"{overview.run.name}: seed {overview.run.settings.seed}"
    return table(title, HEADINGS, [cells for _, cells in overview.rows()], right=(5,))


def metric_rows(lines: Sequence[Line]) -> Iterator[list[str | Cell]]:
    """Yield the cells of every metric of a stage: its name, curve, values, and healthy ones."""
    names = {name: None for line in lines for name in line if name not in NOT_METRICS}
    for name in names:
        values = [line[name] for line in lines if name in line]
        metric = METRICS.get(declared_as(name))
        yield [
            *(name, sparkline(values), f"{values[0]:.4g} → {values[-1]:.4g}"),
            metric.healthy if metric else "",
        ]


def metric_by_stage(overview: Overview, metric: str) -> list[tuple[str, str, list[float]]]:
    """Return a metric's values in each stage that has it, also by domain: (stage, name, values).

    Raises:
        UserError: no stage has it.
    """
    names = {
        name for stage_lines in overview.lines.values() for line in stage_lines for name in line
    }
    matching = sorted(name for name in names if name == metric or name.startswith(f"{metric}/"))
    if not matching or metric in NOT_METRICS:
        prefix = metric.partition("/")[0]
        near = [name for name in names if name.partition("/")[0] == prefix]
        raise UserError(f"no stage has logged {metric}; {hint(metric, sorted(near or names))}")
    return [
        (stage, name, values)
        for stage, lines in overview.lines.items()
        for name in matching
        if (values := [line[name] for line in lines if name in line])
    ]


def metric_table(overview: Overview, metric: str) -> str:
    """Return a table of a metric over the stages."""
    rows = [
        [stage, name, sparkline(values), f"{values[0]:.4g}", f"{fmean(values[-LAST_STEPS:]):.4g}"]
        for stage, name, values in metric_by_stage(overview, metric)
    ]
    headings = ("stage", "metric", "curve", "first", f"mean of the last {LAST_STEPS}")
    return table("", headings, rows, right=(3, 4))


def _cells(
    stage: Stage, state: StageState, lines: Sequence[Line], left: float | None
) -> list[str | Cell]:
    of = lines[-1].get("steps", stage.steps) if lines else None
    steps = f"{lines[-1]['step']}" + (f"/{of}" if of is not None else "") if lines else ""
    curve, text = _curve(lines)
    return [
        Cell(state.state, STATE_STYLES.get(state.state, "")),
        steps or (str(stage.steps) if stage.steps else ""),
        curve,
        text,
        _speed(lines),
        _split(lines),
        clock(left) if left else "",
    ]


def curve_of(lines: Sequence[Line]) -> tuple[str, list[float]] | None:
    """Return the metric that says how a stage does, and its values; None without one."""
    for name in CURVES:
        if values := [line[name] for line in lines if name in line]:
            return name, values
    return None


def _curve(lines: Sequence[Line]) -> tuple[str, str]:
    if (curve := curve_of(lines)) is None:
        return "", ""
    name, values = curve
    if name == ACCURACY:  # of one model after another
        return "", _outcome(lines)
    # A single step is noise: chain_sum's reward went from .28 to .23 in a run that gained.
    width = max(1, min(LAST_STEPS, len(values) // 4))
    rise = fitted_rise(series(lines, name))
    noise = ", within noise" if rise is not None and rise.low <= 0 <= rise.high else ""
    means = f"{fmean(values[:width]):.3g} → {fmean(values[-width:]):.3g}"
    return sparkline(values), f"{name} {means}{noise}"


def _outcome(lines: Sequence[Line]) -> str:
    """Return the best gain that an evaluation has measured, or how many models and domains.

    A gain is that of a model's accuracy on a domain over the first model measured, in points.
    """
    scores: dict[str, dict[str, float]] = {}
    for line in lines:  # each is of all answers to the model's problems so far
        if line.keys() >= LABELLED:
            scores.setdefault(line["model"], {})[line["domain"]] = line[ACCURACY]
    start: dict[str, float] = next(iter(scores.values()), {})
    gains = [
        (100 * (accuracy - start[domain]), model, domain)
        for model, accuracies in [*scores.items()][1:]
        for domain, accuracy in accuracies.items()
        if domain in start
    ]
    if gains:
        gain, model, domain = max(gains)
        return f"best {gain:+.1f}: {model} on {domain}"
    domains = {domain for accuracies in scores.values() for domain in accuracies}
    return " x ".join(
        f"{len(measured)} {noun}{'' if len(measured) == 1 else 's'}"
        for noun, measured in (("model", scores), ("domain", domains))
    )


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """Return the means of equal parts of the finite values, as bars between their extremes.

    Nothing where no value is finite, or they lie too far apart to subtract.
    """
    values = [value for value in values if isfinite(value)]
    if not values:
        return ""
    count = min(width, len(values))
    edges = [len(values) * number // count for number in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    lowest, spread = min(means), max(means) - min(means)
    if not isfinite(spread):
        return ""
    top = len(BARS) - 1
    return "".join(BARS[round(top * (mean - lowest) / spread) if spread else 0] for mean in means)


def _speed(lines: Sequence[Line]) -> str:
    """Return the tokens that a second trains on, over the steps seen."""
    with_tokens = [line for line in lines if "trained_tokens" in line]
    if len(with_tokens) < 2:
        return ""
    seconds = with_tokens[-1]["time"] - with_tokens[0]["time"]
    # A line is written when its step ends: the first one's tokens were trained before the interval.
    tokens = sum(line["trained_tokens"] for line in with_tokens[1:])
    return f"{tokens / seconds:.0f}" if seconds > 0 else ""


def _split(lines: Sequence[Line]) -> str:
    """Return which parts of a step take which share of its seconds, the largest first."""
    seconds = {
        name: sum(line.get(metric, 0.0) for line in lines) for name, metric in SECONDS.items()
    }
    seconds["refit"] -= seconds["engine start"]  # which is logged as a part of it
    total = sum(seconds.values())
    if not total:
        return ""
    largest_first = sorted(seconds.items(), key=lambda pair: -pair[1])
    return " · ".join(
        f"{name} {100 * spent / total:.0f} %" for name, spent in largest_first if spent > total / 50
    )


def health_json(health: Health) -> dict[str, Any]:
    """Return a run's symptoms and verdicts, as `braid look --json` and the report have them."""
    return {
        "health": [asdict(symptom) for symptom in health.symptoms],
        "verdicts": [asdict(verdict) for verdict in health.verdicts],
    }


def overview_json(overview: Overview, health: Health) -> dict[str, Any]:
    """Return what `braid look RUN --json` prints."""
    stages = []
    for stage in overview.run.stages:
        lines = overview.lines.get(stage.name, ())
        curve = curve_of(lines)
        stages.append(
            {
                "name": stage.name,
                "state": overview.states[stage.name].state,
                "step": lines[-1]["step"] if lines else None,
                "steps": stage.steps,
                "metric": curve and curve[0],
                "values": curve and curve[1],
            }
        )
    return {"run": str(overview.run.path), **health_json(health), "stages": stages}
