"""Tables as plain text: a run's plan, its state and its results.

rich measures, wraps and pads every cell, which for a thousand stages takes longer than the rest of
`braid status`.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parallel.settings import EngineSettings, LayoutSettings
from pipeline.launch.progress import latest
from pipeline.report.estimate import Estimate
from pipeline.run.graph import Stage
from pipeline.run.ledger import minutes
from pipeline.run.metrics import Models
from pipeline.run.run import STOPPED_MARK, Run, StageState
from pipeline.text import clock, shown, visible
from stages.kinds import EXPERT

ANSI = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "blue": 34, "cyan": 36}
STYLES = {
    "done": "green",
    "running": "cyan",
    "submitted": "blue",
    "failed": "red",
    "stale": "yellow",
    "pending": "dim",
}
PLAN_HEADINGS = ("stage", "kind", "from", "steps", "engine", "state", "next", "time left")
STATUS_HEADINGS = ("stage", "state", "saved step", "attempts", "time", "note")
OWN_DOMAIN = "◆"
DEEPEST = 12  # levels of indentation; every round of a run adds some more
NOTE_WIDTH = 60  # characters of a cause in a table
PASSED, STOPPED = "passed", "stopped"  # a gate's outcome in a table
# Experts have their own parallelism, so both lines of a layout multiply to all ranks.
OF_DENSE_LAYERS = ("data", "tensor", "pipeline", "virtual_pipeline", "context")
OF_EXPERTS = ("expert", "expert_tensor")


@dataclass(frozen=True)
class Cell:
    """A cell of a table: its text, and a style of `ANSI` or none."""

    text: str
    style: str = ""


def table(
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str | Cell]],
    right: Collection[int] = (),
    coloured: bool | None = None,
) -> str:
    """Return the title, the headings and the rows, each column as wide as its longest cell.

    An empty title or no headings are left out; columns of `right` are aligned to the right.
    `coloured` defaults to whether standard output is a terminal that takes colour.
    """
    if coloured is None:
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown")
        coloured = sys.stdout.isatty() and not plain  # no-color.org
    cells = [[Cell(heading, "bold") for heading in headings]] if headings else []
    cells += [[Cell(each) if isinstance(each, str) else each for each in row] for row in rows]
    texts = [[visible(cell.text) for cell in row] for row in cells]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    lines = [visible(title)] if title else []
    for row, line in zip(cells, texts, strict=True):
        padded = []
        for index, (cell, text, width) in enumerate(zip(row, line, widths, strict=True)):
            gap = " " * (width - len(text))
            if coloured and cell.style:
                text = f"\x1b[{ANSI[cell.style]}m{text}\x1b[0m"
            padded.append(gap + text if index in right else text + gap)
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def plan_table(
    run: Run,
    states: Mapping[str, StageState],
    follows: Mapping[str, str],
    left: Estimate,
) -> str:
    """Return the table of `braid plan`: every stage's state, next action (`follows`), time left.

    Next actions too long for their column follow below it.
    """
    settings, stages = run.settings, run.stages
    names = indented(stages)
    rows = [
        (
            names[stage.name],
            stage.kind,
            _origin(stage),
            str(stage.steps or ""),
            "yes" if stage.needs_engine else "",
            _state_cell(state),
            _shortened(follows[stage.name], NOTE_WIDTH),
            _left_text(left.seconds[stage.name]),
        )
        for stage, state in ((stage, states[stage.name]) for stage in stages)
    ]
    where = f"{layout_text(settings.layout)}; {engines_text(settings.engine)}"
    title = f"{settings.name}: seed {settings.seed}, {where}"
    long = {name: text for name, text in follows.items() if len(text) > NOTE_WIDTH}
    return _with_below(table(title, PLAN_HEADINGS, rows), long)


def left_line(left: Estimate) -> str:
    """Return the sum of an estimate, in a line."""
    if not left.total:
        if left.unknown:
            kinds = ", ".join(left.kinds)
            return f"time left unknown: no stage of kind {kinds} has finished yet"
        gates = ", ".join(left.stopped)
        return f"nothing more can start: stopped by {gates}" if gates else "nothing left to run"
    total = "less than 1 s" if left.total < 1 else f"about {clock(left.total)}"
    line = f"{total} left, {_hours_text(left.total * left.devices / 3600)} of a rank"
    return f"{line}; without {', '.join(left.unknown)}" if left.unknown else line


def _hours_text(hours: float) -> str:
    if hours < 0.01:
        return "less than 0.01 hours"
    return f"{hours:.2f} hours" if hours < 10 else f"{hours:,.0f} hours"


def _left_text(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    if not seconds:
        return ""
    return "< 1 s" if seconds < 1 else clock(seconds)


def status_table(run: Run, states: Mapping[str, StageState]) -> str:
    """Return the table of `braid status`: states, saved steps, attempts, their time, and notes.

    Notes too long for their column follow below it.
    """
    spent = minutes(run.events)
    rows, below = [], {}
    for stage in run.stages:
        state = states[stage.name]
        steps = f"{state.step or 0}/{stage.steps}" if stage.steps else ""
        taken = clock(60 * spent[stage.name]) if stage.name in spent else ""
        attempts = str(state.attempts or "")
        running = state.state == "running"
        note = latest(run.stage(stage.name).metrics) if running else _note(stage, state)
        if not running and note not in (state.cause, PASSED):
            below[stage.name] = state.cause
        rows.append((stage.name, _state_cell(state), steps, attempts, taken, note))
    title = f"{shown(run.path)}{' (running)' if run.is_running() else ''}"
    return _with_below(table(title, STATUS_HEADINGS, rows), below)


def _with_below(above: str, texts: Mapping[str, str]) -> str:
    """Return a table with the full text of its shortened cells below it, by stage."""
    lines = [f"{name}: {visible(text)}" for name, text in texts.items()]
    return "\n".join([above, "", *lines]) if lines else above


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 2].rstrip()} …"


def _note(stage: Stage, state: StageState) -> str:
    """Return the cause of a stage's state, shortened; of a judged gate only its outcome."""
    if stage.kind == "gate" and (state.state == "done" or state.cause.startswith(STOPPED_MARK)):
        stopped = state.cause.startswith(STOPPED_MARK)
        return STOPPED if stopped else _shortened(state.cause.partition(":")[0], NOTE_WIDTH)
    return _shortened(state.cause, NOTE_WIDTH)


def summary(states: Mapping[str, StageState]) -> str:
    """Return how many stages have each state, such as `3 done, 1 failed, 3 pending`."""
    counts = Counter(state.state for state in states.values())
    return ", ".join(f"{number} {state}" for state, number in counts.items())


def results_table(models: Models, step: int | None = None) -> str:
    """Return accuracies in percent, models by domains, each with half its 95 % interval.

    `step` is the step of all models' checkpoints, if one was asked for.
    """
    title = "accuracy in %, with 95 % intervals"
    if any(is_of(domain, model) for model, scores in models.items() for domain in scores):
        title += f"; {OWN_DOMAIN} marks an expert's own domain"
    domains = list(next(iter(models.values()), {}))
    rows: list[tuple[str | Cell, ...]] = []
    for model, scores in models.items():
        cells = [_score_cell(scores[domain], is_of(domain, model)) for domain in domains]
        rows.append((model if step is None else f"{model}, step {step}", *cells))
    return table(title, ("model", *domains), rows, right=range(1, len(domains) + 1))


def is_of(domain: str, model: str) -> bool:
    """Return whether a model is an expert of the domain, of any round."""
    return f".{model}".endswith(f".{EXPERT}{domain}")


def layout_text(layout: LayoutSettings) -> str:
    """Return a layout in words: `4 ranks: data 2, tensor 2; experts: expert 4`."""
    text = f"{layout.ranks} rank{'s' if layout.ranks > 1 else ''}"
    for before, names in ((": ", OF_DENSE_LAYERS), ("; experts: ", OF_EXPERTS)):
        sizes = [(name, getattr(layout, name)) for name in names]
        if shared := ", ".join(f"{name} {size}" for name, size in sizes if size > 1):
            text += before + shared
    return text


def engines_text(engine: EngineSettings) -> str:
    """Return the engines in words: `2 engines x tensor 4`."""
    count = f"{engine.count} engine{'s' if engine.count > 1 else ''}"
    return f"{count} x tensor {engine.tensor}" if engine.tensor > 1 else count


def indented(stages: Sequence[Stage]) -> dict[str, str]:
    """Return the stages' names, indented by their depth below the cold start, at most DEEPEST."""
    depths: dict[str, int] = {}
    for stage in stages:  # dependencies come first
        depths[stage.name] = 1 + max((depths[name] for name in stage.waits_for), default=-1)
    return {name: f"{'  ' * min(depth, DEEPEST)}{name}" for name, depth in depths.items()}


def _origin(stage: Stage) -> str:
    if stage.gated:
        return f"{stage.gated} against {', '.join(dict.fromkeys(stage.against.values()))}"
    if stage.models and not stage.parent:
        return f"{len(stage.models)} models"
    taught = f", taught by {len(stage.teachers)} experts" if stage.teachers else ""
    start = "model.initial_weights" if stage.kind == "import" else "the model settings"
    return f"{stage.parent or start}{taught}"


def _state_cell(state: StageState, more: str = "") -> Cell:
    return Cell(f"{state.state}{more}", STYLES[state.state])


def _score_cell(score: dict[str, Any], own: bool) -> Cell:
    half = (score["high"] - score["low"]) / 2
    text = f"{100 * score['accuracy']:.1f} ± {100 * half:.1f}"
    if "pass_at_k" in score:
        text += f", pass@{score['samples_per_problem']} {100 * score['pass_at_k']:.1f}"
    return Cell(f"{OWN_DOMAIN} {text}", "bold") if own else Cell(text)
