"""A run's plan with the time that it still needs, its state and its results, as tables and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from pipeline.estimate.stage_memory import largest_memory
from pipeline.launch.progress import latest
from pipeline.report.drawing import origin, tree
from pipeline.report.time_left import Estimate, blocked, left_line
from pipeline.run.graph import Stage
from pipeline.run.ledger import minutes
from pipeline.run.metrics import Models, read_models
from pipeline.run.run import STOPPED_MARK, Run, StageState, has_stopped
from pipeline.tables import STATE_STYLES, Cell, engines_text, layout_text, table
from pipeline.text import clock, shown, visible

PLAN_HEADINGS = ("stage", "kind", "from", "steps", "engine", "state", "next", "time left")
STATUS_HEADINGS = ("stage", "state", "saved step", "attempts", "time", "note")
OWN_DOMAIN = "◆"
NOTE_WIDTH = 60  # characters of a cause in a table
PASSED, STOPPED = "passed", "stopped"  # a gate's outcome in a table


def can_continue(stages: Sequence[Stage], states: Mapping[str, StageState]) -> bool:
    """Return whether an unfinished stage would start in a run that has no job and is not stale."""
    state_names, idle = {state.state for state in states.values()}, blocked(stages, states)
    ready = any(states[stage.name].state != "done" and stage.name not in idle for stage in stages)
    return ready and not state_names & {"running", "submitted", "stale"}


def next_action(stages: Sequence[Stage], states: Mapping[str, StageState]) -> dict[str, str]:
    """Return in words what happens to each stage when the run continues."""
    idle, actions = blocked(stages, states), {}
    for stage in stages:
        state = states[stage.name]
        if state.state == "done":
            text = "is kept"
        elif state.state == "stale":
            text = f"is refused: {state.cause}"
        elif state.state == "running":
            text = f"runs, {state.cause}"
        elif state.state == "submitted":
            text = state.cause
        elif has_stopped(state):
            text = "stops again, unless it is overridden or something changes"
        elif gates := idle.get(stage.name):
            text = f"waits for {', '.join(gates)}"
        elif stage.steps and state.step:
            text = f"continues from step {state.step}"
        else:
            text = f"starts, after {', '.join(stage.after)}" if stage.after else "starts"
        actions[stage.name] = text
    return actions


def plan_text(
    run: Run, states: Mapping[str, StageState], follows: Mapping[str, str], left: Estimate
) -> str:
    """Return the table of `braid plan`: every stage's state, next action (`follows`), time left.

    Rows are a tree: a stage stands below what it starts from.

    Next actions too long for their column follow below it, and the sums of time and memory.
    """
    settings, stages = run.settings, run.stages
    names = tree(stages)
    by_name = {stage.name: stage for stage in stages}
    rows = []
    for stage in map(by_name.__getitem__, names):
        time_left = "?"
        if (seconds := left.seconds[stage.name]) is not None:
            time_left = "< 1 s" if 0 < seconds < 1 else clock(seconds) if seconds else ""
        rows.append(
            (
                names[stage.name],
                stage.kind,
                origin(stage),
                str(stage.steps or ""),
                "yes" if stage.needs_engine else "",
                _state_cell(states[stage.name]),
                _shortened(follows[stage.name]),
                time_left,
            )
        )
    where = f"{layout_text(settings.layout)}; {engines_text(settings.engine)}"
    title = f"{settings.name}: seed {settings.seed}, {where}"
    long = {name: text for name, text in follows.items() if len(text) > NOTE_WIDTH}
    sums = f"{left_line(left)}; {largest_memory(settings, stages)}"
    return f"{_with_below(table(title, PLAN_HEADINGS, rows), long)}\n{visible(sums)}"


def plan_json(
    run: Run, states: Mapping[str, StageState], follows: Mapping[str, str], left: Estimate
) -> dict[str, Any]:
    """Return what `braid plan --json` prints."""
    plan = run_state(run, states)
    for stage in plan["stages"]:
        stage |= {"next": follows[stage["name"]], "seconds_left": left.seconds[stage["name"]]}
    return plan


def run_state(run: Run, states: Mapping[str, StageState]) -> dict[str, Any]:
    """Return the state of a run as `--json` prints it.

    `results` are each model's accuracies once the run has been evaluated, else None.
    """
    spent = minutes(run.events)
    done = evaluated(run, states)
    stages = [
        {
            "name": stage.name,
            "kind": stage.kind,
            "needs": list(stage.waits_for),
            "steps": stage.steps,
            **asdict(states[stage.name]),
            "minutes": spent.get(stage.name),
        }
        for stage in run.stages
    ]
    running, results = run.is_running(), current_models(run, states) if done else None
    return {"run": str(run.path), "running": running, "stages": stages, "results": results}


def evaluated(run: Run, states: Mapping[str, StageState]) -> bool:
    """Return whether an evaluation is done and its results are written."""
    done = (stage for stage in run.stages if states[stage.name].state == "done")
    return any(stage.declared.evaluates for stage in done) and run.results.exists()


def current_models(run: Run, states: Mapping[str, StageState]) -> Models | None:
    """Return the results without those of stale evaluations, in order; None where damaged."""
    # A model's results count where any evaluation of it is done, though another one is stale.
    left: dict[bool, set[str]] = {True: set(), False: set()}
    for stage in run.stages:
        if stage.declared.evaluates:
            left[states[stage.name].state == "done"].update(stage.models)
    models, old = read_models(run.results), left[False] - left[True]
    if models is None:
        return None
    return run.in_order({name: scores for name, scores in models.items() if name not in old})


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


def _shortened(text: str) -> str:
    return text if len(text) <= NOTE_WIDTH else f"{text[: NOTE_WIDTH - 2].rstrip()} …"


def _note(stage: Stage, state: StageState) -> str:
    """Return the cause of a stage's state, shortened; of a judged gate only its outcome."""
    if stage.declared.judges and state.cause.startswith(STOPPED_MARK):
        return STOPPED
    judged = stage.declared.judges and state.state == "done"
    return _shortened(state.cause.partition(":")[0] if judged else state.cause)


def summary(states: Mapping[str, StageState]) -> str:
    """Return how many stages have each state, such as `3 done, 1 failed, 3 pending`."""
    counts = Counter(state.state for state in states.values())
    return ", ".join(f"{number} {state}" for state, number in counts.items())


def results_table(
    models: Models, step: int | None = None, own_domains: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Return accuracies in percent, models by domains, each with half its 95 % interval.

    `step` is the step of all models' checkpoints, if one was asked for; `own_domains` has the
    domain that a model alone was trained on.
    """
    domains = list(dict.fromkeys(domain for scores in models.values() for domain in scores))
    rows: list[tuple[str | Cell, ...]] = []
    marked = False
    for model, scores in models.items():
        cells = []
        for domain in domains:
            if (score := scores.get(domain)) is None:  # of an evaluation of fewer domains
                cells.append(Cell(""))
                continue
            half = (score["high"] - score["low"]) / 2
            text = f"{100 * score['accuracy']:.1f} ± {100 * half:.1f}"
            if "pass_at_k" in score:
                text += f", pass@{score['samples_per_problem']} {100 * score['pass_at_k']:.1f}"
            is_own = own_domains.get(model) == domain
            cells.append(Cell(f"{OWN_DOMAIN} {text}", "bold") if is_own else Cell(text))
            marked = marked or is_own
        rows.append((model if step is None else f"{model}, step {step}", *cells))
    title = "accuracy in %, with 95 % intervals"
    title += f"; {OWN_DOMAIN} marks an expert's own domain" if marked else ""
    return table(title, ("model", *domains), rows, right=range(1, len(domains) + 1))


def _state_cell(state: StageState) -> Cell:
    return Cell(state.state, STATE_STYLES[state.state])
