"""Jobs beside the graph, on the finished stages of a run: evaluations, exports, previews."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from pipeline.config.rules import evaluation_rules
from pipeline.config.violations import hint, shown
from pipeline.errors import BraidError
from pipeline.launch.jobs import checkpoint_path
from pipeline.launch.launcher import Launcher, Programs, to_the_end
from pipeline.launch.placement import ThisMachine
from pipeline.launch.progress import watching
from pipeline.launch.signals import Signals
from pipeline.run.directory import RunDirectory, StageDirectory
from pipeline.run.graph import compile_graph
from pipeline.run.results import Models
from pipeline.run.states import derive
from stages.settings import EvaluationSettings, RunSettings, StageJob

# The settings of an evaluation that a command line may change, and how.
FLAGS = {
    "problems": "--problems",
    "samples_per_problem": "--samples",
    "temperature": "--temperature",
}


def evaluate(
    run: RunDirectory,
    settings: RunSettings,
    console: Console,
    programs: Programs,
    stage: str | None = None,
    step: int | None = None,
    domains: Sequence[str] = (),
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Models, Path]:
    """Evaluate one finished stage, or all of them, with `changes` to the run's own evaluation; or
    one stage's checkpoint of a step; on some domains, or on all. Returns what was found, and the
    file that it stands in.

    Raises:
        BraidError: the stage is not finished, there is no such checkpoint or domain, the problems
            are too few, or the evaluation failed.
    """
    for name in domains:
        if name not in settings.domains:
            raise BraidError(f"--domain {name}: no such domain; {hint(name, settings.domains)}")
    if step is None:
        done = finished_training(run, settings, stage)
        models = {name: checkpoint_path(run, name) for name in done}
    elif stage is None:
        raise BraidError(f"--step {step} is of one stage; name it with --stage")
    else:
        models = {stage: checkpoint_of(run, settings, stage, step)}
    settings = settings.model_copy(update={"evaluation": _changed(settings, changes)})
    directory = _new_directory(run, "evaluations")
    job = StageJob(
        stage="evaluate",
        kind="evaluate",
        directory=directory.path.absolute(),
        attempt=1,
        models=models,
        evaluated_on={name: list(dict.fromkeys(domains)) for name in models} if domains else {},
        samples=True,
        settings=settings,
    )
    _execute(run, job, console, programs)
    found: Models = json.loads(directory.results.read_text())["models"]
    return found, directory.results


def _changed(settings: RunSettings, changes: Mapping[str, Any]) -> EvaluationSettings:
    """The run's evaluation with what the flags of FLAGS change.

    Raises BraidError where one of them is out of bounds, or goes with no other.
    """
    try:
        evaluation = EvaluationSettings(**{**settings.evaluation.model_dump(), **changes})
    except ValidationError as error:
        fault = error.errors()[0]
        flag = FLAGS[str(fault["loc"][0])]
        raise BraidError(f"{flag} {fault['input']}: {fault['msg'].lower()}") from None
    for key, message in evaluation_rules(evaluation, settings.layout):
        raise BraidError(f"{FLAGS[key.removeprefix('evaluation.')]} {message}")
    return evaluation


def preview(
    run: RunDirectory,
    settings: RunSettings,
    console: Console,
    programs: Programs,
    checkpoint: Path,
    domain: str,
) -> dict[str, Any]:
    """What the responses of a checkpoint earn in a domain of `settings`, which may be another than
    the run's: one step's groups, as `stages.preview` writes them.

    Raises:
        BraidError: the engines or the rewards failed.
    """
    directory = _new_directory(run, "previews")
    job = StageJob(
        stage="preview",
        kind="preview",
        domain=domain,
        directory=directory.path.absolute(),
        attempt=1,
        parent=checkpoint,
        samples=True,
        settings=settings,
    )
    _execute(run, job, console, programs)
    found: dict[str, Any] = json.loads(directory.results.read_text())
    return found


def export(
    run: RunDirectory,
    settings: RunSettings,
    console: Console,
    programs: Programs,
    stage: str,
    to: Path,
    step: int | None = None,
) -> None:
    """Write a finished stage's model, or a stage's of a step, as a Hugging Face checkpoint.

    Raises:
        BraidError: `to` holds something already, the stage is not finished, there is no such
            checkpoint, or the export failed.
    """
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise BraidError(f"{shown(to)} holds something already; choose another --to")
    parent = checkpoint_of(run, settings, stage, step)
    job = StageJob(
        stage="export",
        kind="export",
        directory=_new_directory(run, "exports").path.absolute(),
        attempt=1,
        parent=parent,
        output=to.absolute(),
        settings=settings,
    )
    _execute(run, job, console, programs)


def checkpoint_of(run: RunDirectory, settings: RunSettings, stage: str, step: int | None) -> Path:
    """The last checkpoint of a finished stage, or that of a step, which the stage may have kept
    while it was not finished.

    Raises:
        BraidError: there is none, or it was made from other settings or inputs than the run's.
    """
    stages = compile_graph(settings)
    trained = {each.name for each in stages if each.trains}
    state = derive(run, settings, stages)[stage] if stage in trained else None
    if step is None or state is None or state.state == "stale":
        finished_training(run, settings, stage)
    return checkpoint_path(run, stage, step)


def finished_training(
    run: RunDirectory, settings: RunSettings, stage: str | None = None
) -> list[str]:
    """The stages with a finished model, or just the one asked for.

    Raises:
        BraidError: there is no such finished stage.
    """
    stages = compile_graph(settings)
    states = derive(run, settings, stages)
    known = [each.name for each in stages if each.trains]
    done = [name for name in known if states[name].state == "done"]
    if stage is None and done:
        return done
    if stage in done:
        return [stage]
    if stage is not None and stage not in known:
        raise BraidError(f"no stage {stage} leaves a model; {hint(stage, known)}")
    what = f"stage {stage} is {states[stage].state}" if stage else "no stage is done yet"
    raise BraidError(f"{shown(run.path)}: {what}; finish it with: braid resume {shown(run.path)}")


def _new_directory(run: RunDirectory, folder: str) -> StageDirectory:
    """One that is not there yet: an evaluation keeps the results that it finds."""
    name = time.strftime("%Y%m%d-%H%M%S")
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    return StageDirectory(
        next(path for each in names if not (path := run.path / folder / each).exists())
    )


def _execute(run: RunDirectory, job: StageJob, console: Console, programs: Programs) -> None:
    metrics = StageDirectory(job.directory).metrics
    placement = ThisMachine(job.settings.engine)
    with (
        Signals() as signals,
        Launcher(run.engines, job.settings, programs, placement, signals) as launcher,
        watching(console, job.stage, None, metrics) as view,
    ):
        to_the_end(launcher.execute(job, view))
