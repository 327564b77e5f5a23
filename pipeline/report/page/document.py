"""The data of a run's report, as JSON: health, stages, gates, comparison, curves and samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

import yaml
from pydantic import BaseModel

from parallel.errors import UserError
from pipeline.report.compare.comparison import compare, comparison_json, held_out_gains
from pipeline.report.compare.difference import difference
from pipeline.report.compare.stage_costs import stage_costs
from pipeline.report.drawing import edges, origin, tree
from pipeline.report.page.recorded import Recorded
from pipeline.report.page.redaction import LEFT_OUT, plain_setting
from pipeline.report.page.timelines import timelines
from pipeline.report.page.training import curves, guards, history, planned_memory
from pipeline.report.view.experts import MOST
from pipeline.report.view.health import judged
from pipeline.report.view.overview import MOST_BYTES, health_json
from pipeline.run.answers import measured_models
from pipeline.run.ledger import minutes
from pipeline.run.metrics import Line, newest_lines
from pipeline.run.routing import churn, owned, read_loads, summed
from pipeline.run.run import DamagedVerdict, Run, StageState, read_verdict
from pipeline.slurm.queue import states_now
from pipeline.text import reason
from stages.data.tokenizer import tokenizer_named
from stages.metric_definitions import METRICS, panel_of

VARIANTS = ("name", "kind")  # keys that say which of several blocks one is
MOST_MAPS = 40  # steps of a stage whose experts are shown

Json = dict[str, Any]


def document(run: Run, other_runs: Sequence[Run], redacted: bool, most_samples: int) -> Json:
    """Return what the report of a run shows, beside the curves of `other_runs`.

    With `redacted` it is what `redact` is given, without prompts, responses, answers and what
    rewards said. Of more than `most_samples` samples, those of a part of the prompts are in it.
    """
    states = states_now(run)
    if redacted:  # a cause quotes what a reward failed on, and a symptom the cause
        states = {
            name: replace(state, cause=LEFT_OUT if state.cause else "")
            for name, state in states.items()
        }
    damaged: list[str] = []  # what could not be read: it costs its own block
    lines = _all_lines(run, damaged)
    recorded = Recorded(run, redacted, most_samples)
    samples, routing = recorded.tables(), _routing(run, damaged)
    damaged += recorded.damaged
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "redacted": redacted,
        "run": {"name": run.name, "seed": run.settings.seed, "path": str(run.path)},
        **health_json(judged(run, states, lines, held_out_gains(run, states))),
        "stages": [*_stages(run, states)],
        "edges": [vars(edge) for edge in edges(run.stages)],
        **_comparison(run),
        "measured": [
            stage.name
            for stage in run.stages
            if stage.declared.evaluates and states[stage.name].state == "done"
        ],
        "definitions": {
            name: {**metric._asdict(), "panel": panel_of(name)} for name, metric in METRICS.items()
        },
        "curves": {name: curves(stage_lines) for name, stage_lines in lines.items() if stage_lines},
        "history": {
            stage.name: [*history(run, stage.name, lines[stage.name])] for stage in run.stages
        },
        "guards": {stage.name: guards(run, stage, lines[stage.name]) for stage in run.stages},
        "others": {
            name: _other(run, other, damaged) for name, other in _named(run, other_runs).items()
        },
        "samples": samples,
        "routing": routing,
        "costs": _costs(run, damaged),
        "timelines": timelines(run, damaged),
        "vocabulary": {} if redacted else _vocabulary(run, samples, damaged),
        "damaged": damaged,
        "settings": _stated(run, redacted),
        "commands": [
            f"braid look {run.name}",
            run.resume_command(),
            f"braid bundle {run.name}",
        ],
    }


def _named(run: Run, other_runs: Sequence[Run]) -> dict[str, Run]:
    """Return the other runs by names that differ: of equal ones the directory is the name."""
    names = Counter([run.name, *(other.name for other in other_runs)])
    return {
        other.name if names[other.name] == 1 else str(other.path): other for other in other_runs
    }


def _other(run: Run, other: Run, damaged: list[str]) -> Json:
    """Return what the report shows of a run beside its own: curves, results and what differs."""
    lines = _all_lines(other, damaged)
    return {
        "curves": {name: curves(stage_lines) for name, stage_lines in lines.items() if stage_lines},
        "differences": difference(run, other),
        **_comparison(other),
    }


def _routing(run: Run, damaged: list[str]) -> dict[str, Json]:
    """Return the recorded loads of experts of every stage that has some, but of damaged files."""
    routing: dict[str, Json] = {}
    for stage in run.stages:
        try:
            loads = read_loads(run.stage(stage.name), MOST_MAPS)
        except UserError as error:
            damaged.append(str(error))
            continue
        if loads:
            routing[stage.name] = {
                "steps": [{"step": load.step, "slots": load.slots} for load in loads],
                "owned": {name: experts[:MOST] for name, experts in owned(summed(loads)).items()},
                "churn": churn(loads),
            }
    return routing


def _costs(run: Run, damaged: list[str]) -> list[Json]:
    """Return the cost of every stage; none where a file cannot be read, which is noted."""
    try:
        return [asdict(cost) for cost in stage_costs(run)]
    except OSError as error:
        damaged.append(f"the costs of stages: {reason(error)}")
        return []


def _vocabulary(run: Run, samples: Mapping[str, Json], damaged: list[str]) -> dict[int, str]:
    """Return the texts of the token ids whose values are in the report, if there is a tokenizer."""
    ids = {
        id
        for table in samples.values()
        for tokens in table["tokens"].values()
        for id in tokens["ids"]
    }
    if not ids:
        return {}
    try:
        tokenizer = tokenizer_named(run.settings.model.tokenizer)
    except UserError as error:
        damaged.append(str(error))
        return {}
    return {id: tokenizer.decode_prompt([id]) for id in sorted(ids)}


def _stated(run: Run, redacted: bool) -> str:
    """Return the settings that differ from their defaults, as YAML."""
    settings = _changed(run.settings)
    settings = plain_setting(settings) if redacted else settings
    return str(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))


def _changed(value: Any) -> Any:
    """Return a block's keys that differ from their defaults, and those that name its variant.

    pydantic's `exclude_defaults` would leave out which variant of several a block is.
    """
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        return {
            name: _changed(setting)
            for name, setting in value
            if name in VARIANTS or name not in fields or setting != fields[name].get_default()
        }
    if isinstance(value, Mapping):
        return {str(key): _changed(setting) for key, setting in value.items()}
    if isinstance(value, (list, tuple)):
        return [_changed(element) for element in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _all_lines(run: Run, damaged: list[str]) -> dict[str, list[Line]]:
    """Return each stage's metrics; why one's cannot be read is added to `damaged`."""
    lines: dict[str, list[Line]] = {}
    for stage in run.stages:
        try:
            lines[stage.name] = newest_lines(run.stage(stage.name).metrics, MOST_BYTES)
        except OSError as error:
            lines[stage.name] = []
            damaged.append(reason(error))
    return lines


def _stages(run: Run, states: Mapping[str, StageState]) -> Iterator[Json]:
    spent, stages = minutes(run.events), {stage.name: stage for stage in run.stages}
    for name, branch in tree(run.stages).items():
        stage, state = stages[name], states[name]
        fields: Json = {
            "branch": branch,
            **{"name": stage.name, "kind": stage.kind, "from": origin(stage)},
            **{"state": state.state, "cause": state.cause, "attempts": state.attempts},
            **{"steps": stage.steps, "step": state.step, "minutes": spent.get(stage.name)},
            **{"domains": list(stage.domains), "planned_bytes": planned_memory(run, stage)},
        }
        if stage.declared.judges:
            try:
                verdict = read_verdict(run.stage(stage.name))
            except DamagedVerdict as error:
                fields["reasons"] = [str(error)]
            else:
                fields["outcome"] = verdict and verdict.outcome
                fields["reasons"] = list(verdict.reasons) if verdict else []
        yield fields


def _comparison(run: Run) -> Json:
    """Return the comparison of the run's models, or why there is none."""
    try:
        return {"comparison": comparison_json(compare(run, measured_models(run), [], None))}
    except (UserError, OSError) as error:
        return {"comparison": None, "not_compared": reason(error)}
