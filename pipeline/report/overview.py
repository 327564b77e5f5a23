"""The overview of a run: its health, and a line of each stage with its curve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from pipeline.report.drawing import tree
from pipeline.report.health import Symptom
from pipeline.report.status import STYLES
from pipeline.report.tables import Cell, table
from pipeline.run.graph import Stage
from pipeline.run.metrics import Line
from pipeline.run.run import Run, StageState
from pipeline.text import clock

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 16  # bars of a curve
ACCURACY = "accuracy"
# The first that a stage logs is its curve.
CURVES = (ACCURACY, "teacher_kl", "reward", "kept", "loss")
SECONDS = ("rollout", "train", "refit", "offload", "wake")  # parts of a step, in metrics
HEADINGS = ("stage", "state", "steps", "curve", "", "tokens/s", "where a step's seconds go", "left")


def health_lines(found: Sequence[Symptom]) -> Iterator[Cell]:
    """Yield a line for each finding, or the one that says that there is none."""
    for each in found:
        yield Cell(f"{'!' if each.alarm else '·'} {each}", "red" if each.alarm else "yellow")
    if not found:
        yield Cell("✓ nothing is out of its range", "green")


def stage_table(
    run: Run,
    states: Mapping[str, StageState],
    lines: Mapping[str, Sequence[Line]],
    left: Mapping[str, float | None],
) -> str:
    """Return the table of a run's stages, as a tree."""
    known = {stage.name: stage for stage in run.stages}
    rows = [
        [branch, *_cells(known[name], states[name], lines.get(name, ()), left[name])]
        for name, branch in tree(run.stages).items()
    ]
    return table(f"{run.name}: seed {run.settings.seed}", HEADINGS, rows, right=(5,))


def _cells(
    stage: Stage, state: StageState, lines: Sequence[Line], left: float | None
) -> list[str | Cell]:
    steps = f"{lines[-1]['step']}/{lines[-1].get('steps', stage.steps)}" if lines else ""
    curve, text = _curve(lines)
    return [
        Cell(state.state, STYLES.get(state.state, "")),
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
    if (found := curve_of(lines)) is None:
        return "", ""
    name, values = found
    if name == ACCURACY:  # of one model after another
        return "", f"{name} {values[-1]:.3g}"
    return sparkline(values), f"{name} {values[0]:.3g} → {values[-1]:.3g}"


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """Return the means of equal parts of the values, as bars between the lowest and the highest."""
    count = min(width, len(values))
    edges = [len(values) * each // count for each in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    lowest, spread = min(means), max(means) - min(means)
    top = len(BARS) - 1
    return "".join(BARS[round(top * (each - lowest) / spread) if spread else 0] for each in means)


def _speed(lines: Sequence[Line]) -> str:
    """Return the tokens that a second trains on, over the steps seen."""
    with_tokens = [line for line in lines if "trained_tokens" in line]
    if len(with_tokens) < 2:
        return ""
    seconds = with_tokens[-1]["time"] - with_tokens[0]["time"]
    tokens = sum(line["trained_tokens"] for line in with_tokens[1:])
    return f"{tokens / seconds:.0f}" if seconds > 0 else ""


def _split(lines: Sequence[Line]) -> str:
    """Return which parts of a step take which share of its seconds, the largest first."""
    found = {name: sum(line.get(f"seconds_{name}", 0.0) for line in lines) for name in SECONDS}
    total = sum(found.values())
    if not total:
        return ""
    parts = sorted(found.items(), key=lambda each: -each[1])
    return " · ".join(
        f"{name} {100 * part / total:.0f} %" for name, part in parts if part > total / 50
    )


def overview_json(
    run: Run,
    states: Mapping[str, StageState],
    lines: Mapping[str, Sequence[Line]],
    found: Sequence[Symptom],
) -> dict[str, Any]:
    """Return what `braid look RUN --json` prints."""
    stages = []
    for stage in run.stages:
        own = lines.get(stage.name, ())
        curve = curve_of(own)
        stages.append(
            {
                "name": stage.name,
                "state": states[stage.name].state,
                "step": own[-1]["step"] if own else None,
                "steps": stage.steps,
                "metric": curve and curve[0],
                "values": curve and curve[1],
            }
        )
    health = [
        {"stage": each.stage, "what": each.what, "remedy": each.remedy, "alarm": each.alarm}
        for each in found
    ]
    return {"run": str(run.path), "health": health, "stages": stages}
