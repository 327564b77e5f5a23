"""What a run shows: its plan, its state, its table of results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from parallel.settings import EngineSettings, LayoutSettings
from pipeline.config.violations import shown
from pipeline.launch.progress import latest
from pipeline.report import columns
from pipeline.report.columns import Cell
from pipeline.report.estimate import Estimate
from pipeline.run.graph import Stage
from pipeline.run.ledger import minutes
from pipeline.run.results import Models
from pipeline.run.run import Run
from pipeline.run.states import STOPPED_MARK, StageState
from pipeline.text import clock, visible
from stages.kinds import EXPERT

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
DEEPEST = 12  # levels that a name is indented by; every round of a run has some more
NOTE_WIDTH = 60  # characters of a cause that stand in a table
PASSED, STOPPED = "passed", "stopped"  # what a table says of a gate
# Experts are spread over the ranks on their own, so that both lines of a layout fill all ranks.
OF_DENSE_LAYERS = ("data", "tensor", "pipeline", "virtual_pipeline", "context")
OF_EXPERTS = ("expert", "expert_tensor")


def plan_table(
    run: Run,
    states: Mapping[str, StageState],
    follows: Mapping[str, str],
    left: Estimate,
    coloured: bool,
) -> str:
    """The stages in order: what each does, from what, for how long, whether it is done, what
    `follows` for it and why, and how long that takes; what is too long for a column stands below.
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
            columns.shortened(follows[stage.name], NOTE_WIDTH),
            _left_text(left.seconds[stage.name]),
        )
        for stage, state in ((stage, states[stage.name]) for stage in stages)
    ]
    where = f"{layout_text(settings.layout)}; {engines_text(settings.engine)}"
    title = f"{settings.name}: seed {settings.seed}, {where}"
    table = columns.table(title, PLAN_HEADINGS, rows, coloured)
    return _with_below(table, {k: v for k, v in follows.items() if len(v) > NOTE_WIDTH})


def left_line(left: Estimate) -> str:
    """The sum of an estimate, in a line."""
    if not left.total:
        if left.unknown:
            kinds = ", ".join(left.kinds)
            return f"how long it takes is not known: no stage of the kind {kinds} has ended yet"
        gates = ", ".join(left.stopped)
        return f"nothing more can start: stopped by {gates}" if gates else "nothing is left to run"
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


def status_table(run: Run, states: Mapping[str, StageState], coloured: bool) -> str:
    """Where every stage stands, what it saved, how long its ended attempts took, and a note; what
    is too long for a column stands below the table, unless all is well."""
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
    return _with_below(columns.table(title, STATUS_HEADINGS, rows, coloured), below)


def _with_below(table: str, texts: Mapping[str, str]) -> str:
    """A table, and below it in full what stages' columns had no room for."""
    lines = [f"{name}: {visible(text)}" for name, text in texts.items()]
    return "\n".join([table, "", *lines]) if lines else table


def _note(stage: Stage, state: StageState) -> str:
    """Why a stage stands so, in a few words: of a gate that was judged, no more than how."""
    if stage.kind == "gate" and (state.state == "done" or state.cause.startswith(STOPPED_MARK)):
        stopped = state.cause.startswith(STOPPED_MARK)
        return STOPPED if stopped else columns.shortened(state.cause.partition(":")[0], NOTE_WIDTH)
    return columns.shortened(state.cause, NOTE_WIDTH)


def summary(states: Mapping[str, StageState]) -> str:
    """How many stages stand where, such as `3 done, 1 failed, 3 pending`."""
    counts = Counter(state.state for state in states.values())
    return ", ".join(f"{number} {state}" for state, number in counts.items())


def results_table(models: Models, step: int | None = None) -> Group:
    """Models by domains: accuracy and the half-width of its 95 % interval, in percent; of their
    checkpoints of a step, where one was asked for."""
    title = "accuracy in %, with 95 % intervals"
    if any(is_of(domain, model) for model, scores in models.items() for domain in scores):
        title += f"; {OWN_DOMAIN} marks an expert's own domain"
    table = plain_table("")
    table.add_column("model")
    domains = list(next(iter(models.values()), {}))
    for domain in domains:
        table.add_column(domain, justify="right")
    for model, scores in models.items():
        cells = [_score_text(scores[domain], is_of(domain, model)) for domain in domains]
        table.add_row(model if step is None else f"{model}, step {step}", *cells)
    return Group(title, table)  # a title of the table's would break at its width


def is_of(domain: str, model: str) -> bool:
    """Whether a model is an expert of the domain, of any round."""
    return f".{model}".endswith(f".{EXPERT}{domain}")


def layout_text(layout: LayoutSettings) -> str:
    """The ranks and every parallelism above 1: `4 ranks: data 2, tensor 2; experts: expert 4`."""
    text = f"{layout.ranks} rank{'s' if layout.ranks > 1 else ''}"
    for before, names in ((": ", OF_DENSE_LAYERS), ("; experts: ", OF_EXPERTS)):
        sizes = [(name, getattr(layout, name)) for name in names]
        if shared := ", ".join(f"{name} {size}" for name, size in sizes if size > 1):
            text += before + shared
    return text


def engines_text(engine: EngineSettings) -> str:
    """How many engines of how many ranks: `2 engines x tensor 4`."""
    count = f"{engine.count} engine{'s' if engine.count > 1 else ''}"
    return f"{count} x tensor {engine.tensor}" if engine.tensor > 1 else count


def plain_table(title: str) -> Table:
    """A table without lines, its title at the left: as every command prints them."""
    return Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False)


def indented(stages: Sequence[Stage]) -> dict[str, str]:
    """Return the stages' names, each as far to the right as it is deep below the cold start, up to
    DEEPEST levels."""
    depths: dict[str, int] = {}
    for stage in stages:  # what it waits for comes first
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


def _score_text(score: dict[str, Any], own: bool) -> Text:
    half = (score["high"] - score["low"]) / 2
    text = f"{100 * score['accuracy']:.1f} ± {100 * half:.1f}"
    if "pass_at_k" in score:
        text += f", pass@{score['samples_per_problem']} {100 * score['pass_at_k']:.1f}"
    return Text(f"{OWN_DOMAIN} {text}", style="bold") if own else Text(text)
