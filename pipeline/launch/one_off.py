"""The jobs outside the graph, on finished stages of a run: evaluations, exports, previews."""

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
from pipeline.errors import BraidError
from pipeline.launch.launcher import Launcher, Programs, checkpoint_path, run_to_the_end
from pipeline.launch.placement import ThisMachine
from pipeline.launch.processes import Signals
from pipeline.launch.progress import watching
from pipeline.run.directory import RunDirectory
from pipeline.run.metrics import Models
from pipeline.run.run import Run
from pipeline.text import hint, shown
from stages.directory import StageDirectory
from stages.settings import EvaluationSettings, RunSettings, StageJob

# The settings of an evaluation that options of `braid evaluate` override.
FLAGS = {
    "problems": "--problems",
    "samples_per_problem": "--samples",
    "temperature": "--temperature",
}


def evaluate(
    run: Run,
    console: Console,
    programs: Programs,
    stage: str | None = None,
    step: int | None = None,
    domains: Sequence[str] = (),
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Models, Path]:
    """Evaluate finished stages, or one stage's checkpoint of a step; return accuracies and file.

    Args:
        run: the run, whose own results stay as they are.
        console: where progress is shown.
        programs: the commands of its processes.
        stage: the one stage to evaluate; all finished ones where it is None.
        step: the step of that stage's checkpoint; the newest where it is None.
        domains: the domains to evaluate on; all where there are none.
        changes: settings that override those of the run's `evaluation`.

    Raises:
        BraidError: the stage is not finished, there is no such checkpoint or domain, there are too
            few problems, or the evaluation failed.
    """
    settings = run.settings
    for name in domains:
        if name not in settings.domains:
            raise BraidError(f"--domain {name}: no such domain; {hint(name, settings.domains)}")
    if step is None:
        done = finished_training(run, stage)
        models = {name: checkpoint_path(run, name) for name in done}
    elif stage is None:
        raise BraidError(f"--step {step} needs --stage: a step belongs to one stage")
    else:
        models = {stage: checkpoint_of(run, stage, step)}
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
    """Return the run's evaluation settings with `changes` applied.

    Raises:
        BraidError: a value is out of bounds or conflicts with another.
    """
    try:
        evaluation = EvaluationSettings(**{**settings.evaluation.model_dump(), **changes})
    except ValidationError as error:
        first = error.errors()[0]
        flag = FLAGS[str(first["loc"][0])]
        raise BraidError(f"{flag} {first['input']}: {first['msg'].lower()}") from None
    for key, message in evaluation_rules(evaluation, settings.layout):
        raise BraidError(f"{FLAGS[key.removeprefix('evaluation.')]}: {message}")
    return evaluation


def preview(
    run: RunDirectory,
    settings: RunSettings,
    console: Console,
    programs: Programs,
    checkpoint: Path,
    domain: str,
) -> dict[str, Any]:
    """Sample one step's groups from a checkpoint and return their rewards.

    `settings` has the `domain` and may differ from the run's; `stages.preview` writes the groups.

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
    run: Run, console: Console, programs: Programs, stage: str, to: Path, step: int | None = None
) -> None:
    """Write the model of a finished stage, or of a stage's step, as a Hugging Face checkpoint.

    Raises:
        BraidError: `to` is not empty, the stage is not finished, there is no such checkpoint, or
            the export failed.
    """
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise BraidError(f"{shown(to)} exists and is not empty; choose another --to")
    parent = checkpoint_of(run, stage, step)
    job = StageJob(
        stage="export",
        kind="export",
        directory=_new_directory(run, "exports").path.absolute(),
        attempt=1,
        parent=parent,
        output=to.absolute(),
        settings=run.settings,
    )
    _execute(run, job, console, programs)


def checkpoint_of(run: Run, stage: str, step: int | None) -> Path:
    """Return the last checkpoint of a finished stage, or a stage's checkpoint of a step.

    With a step, the stage need not be finished.

    Raises:
        BraidError: there is no such checkpoint, or it is stale.
    """
    state = run.states[stage] if stage in _trained(run) else None
    if step is None or state is None or state.state == "stale":
        finished_training(run, stage)
    return checkpoint_path(run, stage, step)


def finished_training(run: Run, stage: str | None = None) -> list[str]:
    """Return the stages with a finished model, or only the given one.

    Raises:
        BraidError: there is no such finished stage.
    """
    known = _trained(run)
    done = [name for name in known if run.states[name].state == "done"]
    if stage is None and done:
        return done
    if stage in done:
        return [stage]
    if stage is not None and stage not in known:
        raise BraidError(f"no stage {stage} has a model; {hint(stage, known)}")
    what = f"stage {stage} is {run.states[stage].state}" if stage else "no stage is done yet"
    raise BraidError(f"{shown(run.path)}: {what}; finish it with: braid resume {shown(run.path)}")


def _trained(run: Run) -> list[str]:
    return [stage.name for stage in run.stages if stage.trains]


def _new_directory(run: RunDirectory, parent: str) -> StageDirectory:
    """Return a directory named after the time that does not exist yet."""
    name = time.strftime("%Y%m%d-%H%M%S")
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    return StageDirectory(
        next(path for each in names if not (path := run.path / parent / each).exists())
    )


def _execute(run: RunDirectory, job: StageJob, console: Console, programs: Programs) -> None:
    metrics = StageDirectory(job.directory).metrics
    placement = ThisMachine(job.settings.engine)
    with (
        Signals() as signals,
        Launcher(run.engines, job.settings, programs, placement, signals) as launcher,
        watching(console, job.stage, None, metrics) as view,
    ):
        run_to_the_end(launcher.execute(job, view))
