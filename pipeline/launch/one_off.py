"""The jobs outside the graph: evaluations, exports, previews, checks, and rewards graded again."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from parallel.engine.platform import check_cpu_engine
from parallel.errors import UserError, hint
from parallel.files import write_atomically
from parallel.machine.gpus import hidden_gpus, usable_gpus
from parallel.machine.slots import share_gpus
from pipeline.config.rules import answer_rules, evaluation_rules
from pipeline.launch.launcher import Launcher, run_to_the_end
from pipeline.launch.placement import ForkServers, Programs, ThisMachine
from pipeline.launch.processes import Child, Signals, kill, python_module, wait_for_all
from pipeline.launch.progress import Screen
from pipeline.run.directory import RunDirectory, check_owner
from pipeline.run.graph import rerun_options
from pipeline.run.metrics import Models
from pipeline.run.run import Run
from pipeline.text import say, shown
from stages.directory import StageDirectory
from stages.domains import DomainEvaluationSettings
from stages.kinds.evaluate.settings import EVALUATE, EvaluationSettings
from stages.kinds.export.settings import EXPORT
from stages.settings import RunSettings, StageJob

DIRECTORIES = {EVALUATE.name: "evaluations", "preview": "previews", EXPORT.name: "exports"}
LOOK_SECONDS = 0.5  # between two checks for a signal
# The settings of an evaluation that options of `braid evaluate` override.
FLAGS = {
    "problems": "--problems",
    "samples_per_problem": "--samples",
    "temperature": "--temperature",
    "top_p": "--top-p",
    "top_k": "--top-k",
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
    """Evaluate all finished stages or one `stage`, at a `step`; return accuracies and their file.

    On all `domains` where none is named; `changes` override the run's `evaluation` settings. The
    run's own results stay as they are.

    Raises:
        UserError: the stage is not finished, there is no such checkpoint or domain, there are too
            few problems, or the evaluation failed.
    """
    settings = run.settings
    for name in domains:
        if name not in settings.domains:
            raise UserError(f"--domain {name}: no such domain; {hint(name, settings.domains)}")
    if step is None:
        models = {name: run.checkpoint_path(name) for name in finished_training(run, stage)}
    elif stage is None:
        raise UserError(f"--step {step} needs --stage: a step belongs to one stage")
    else:
        models = {stage: checkpoint_of(run, stage, step)}
    results = _execute(
        run,
        console,
        programs,
        _evaluated(settings, changes),
        EVALUATE.name,
        models=models,
        evaluated_on={name: list(dict.fromkeys(domains)) for name in models} if domains else {},
        samples=True,
    )
    accuracies: Models = json.loads(results.read_text())["models"]
    return accuracies, results


def _evaluated(settings: RunSettings, changes: Mapping[str, Any]) -> RunSettings:
    """Return the run's settings with `changes` of the evaluation, which its domains follow too.

    Raises:
        UserError: a value is out of bounds or conflicts with another.
    """
    cleared = {key: None for key in changes if key in DomainEvaluationSettings.model_fields}
    domains = {
        name: domain.model_copy(update={"evaluation": domain.evaluation.model_copy(update=cleared)})
        for name, domain in settings.domains.items()
    }
    evaluation = _changed(settings, changes)
    evaluated = settings.model_copy(update={"evaluation": evaluation, "domains": domains})
    # After both are changed: a domain's own sampling is checked with the run's.
    for key, message in answer_rules(evaluated):
        raise UserError(f"{FLAGS.get(key.removeprefix('evaluation.'), key)}: {message}")
    return evaluated


def _changed(settings: RunSettings, changes: Mapping[str, Any]) -> EvaluationSettings:
    """Return the run's evaluation settings with `changes` applied.

    Raises:
        UserError: a value is out of bounds or conflicts with another.
    """
    try:
        evaluation = EvaluationSettings(**{**settings.evaluation.model_dump(), **changes})
    except ValidationError as error:
        details = error.errors()[0]
        flag = FLAGS[str(details["loc"][0])]
        raise UserError(f"{flag} {details['input']}: {details['msg'].lower()}") from None
    for key, message in evaluation_rules(evaluation, settings.layout):
        raise UserError(f"{FLAGS[key.removeprefix('evaluation.')]}: {message}")
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

    `settings` has the `domain` and may differ from the run's; `stages.domain_tools.preview` writes
    the groups.

    Raises:
        UserError: the engines or the rewards failed.
    """
    sampled = {"domain": domain, "parent": checkpoint, "samples": True}
    results = _execute(run, console, programs, settings, "preview", **sampled)
    content: dict[str, Any] = json.loads(results.read_text())
    return content


def export(
    run: Run, console: Console, programs: Programs, stage: str, to: Path, step: int | None = None
) -> None:
    """Write the model of a finished stage, or of a stage's step, as a Hugging Face checkpoint.

    Raises:
        UserError: `to` is neither new nor an empty directory that can be replaced, the stage is
            not finished or already left the export, there is no such checkpoint, or the export
            failed.
    """
    if any(
        candidate.name == stage and candidate.declared.exports_itself for candidate in run.stages
    ):
        there = shown(run.stage(stage).exported)
        raise UserError(f"{stage} is quantized, and its stage already leaves the export: {there}")
    _check_free(to)
    written = {"parent": checkpoint_of(run, stage, step), "output": to.absolute()}
    _execute(run, console, programs, run.settings, EXPORT.name, **written)


def _check_free(to: Path) -> None:
    """Raise UserError unless a directory can get this name; an empty one is replaced then."""
    if to.is_symlink():
        raise UserError(
            f"{shown(to)} is a link; name the directory itself: --to {os.path.realpath(to)}"
        )
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise UserError(f"{shown(to)} exists and is not empty; choose another --to")
    if to.is_mount():
        raise UserError(
            f"{shown(to)} is a mount point; name a directory in it: --to {to / 'model'}"
        )


def checkpoint_of(run: Run, stage: str, step: int | None) -> Path:
    """Return the last checkpoint of a finished stage, or a stage's checkpoint of a step.

    With a step, the stage need not be finished.

    Raises:
        UserError: there is no such checkpoint, or it is stale.
    """
    trained = next(
        (candidate for candidate in run.stages if candidate.name == stage and candidate.trains),
        None,
    )
    if step is None or trained is None or run.states[stage].state == "stale":
        finished_training(run, stage)
    return run.checkpoint_path(stage, step)


def finished_training(run: Run, stage: str | None = None) -> list[str]:
    """Return the stages with a finished model, or only the given one.

    Raises:
        UserError: there is no such finished stage.
    """
    with_model = [candidate.name for candidate in run.stages if candidate.trains]
    done = [name for name in with_model if run.states[name].state == "done"]
    if stage is None and done:
        return done
    if stage in done:
        return [stage]
    if stage is not None and stage not in with_model:
        raise UserError(f"no stage {stage} has a model; {hint(stage, with_model)}")
    what = f"stage {stage} is {run.states[stage].state}" if stage else "no stage is done yet"
    stale = [name for name, state in run.states.items() if state.state == "stale"]
    resume = f"{run.resume_command()} {rerun_options(run.stages, stale)}".rstrip()
    raise UserError(f"{shown(run.path)}: {what}; finish it with: {resume}")


def _execute(
    run: RunDirectory,
    console: Console,
    programs: Programs,
    settings: RunSettings,
    kind: str,
    **fields: Any,
) -> Path:
    """Run a job in a directory named after the time; return the path of its results."""
    name = time.strftime("%Y%m%d-%H%M%S")
    # Two jobs may begin within one second.
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    paths = (run.path / DIRECTORIES[kind] / directory_name for directory_name in names)
    directory = StageDirectory(next(path for path in paths if not path.exists()))
    job = StageJob(
        stage=kind,
        kind=kind,
        directory=directory.path.absolute(),
        domains=list(settings.domains),
        attempt=1,
        settings=settings,
        **fields,
    )
    engine = settings.engine if job.samples else None
    if job.samples and not usable_gpus():
        check_cpu_engine(settings.model)
    gpus = share_gpus(settings.layout, engine, usable_gpus())
    with (
        Signals() as signals,
        # One import for all ranks, which would each take 10 s of CPU time for it.
        ForkServers(run.fork_servers, settings.launch.fork_servers) as servers,
        Launcher(
            run.engines,
            settings,
            programs,
            ThisMachine(settings.engine, servers=servers, gpus=gpus),
            signals,
        ) as launch,
        Screen(console) as screen,
        screen.watching(kind, None, directory.metrics) as view,
    ):
        run_to_the_end(launch.execute(job, view))
    return directory.results


def answer_of(
    name: str, module: str, job: Mapping[str, Any], check: Callable[[], None] | None = None
) -> Any:
    """Run a module on a job as a process of its own, and return the JSON of its result file.

    The module may import everything that this process must not. The job gets the file as `result`.
    `check` is called again and again, and raises to stop; without one a signal stops it, for which
    this must be the main thread.

    Raises:
        UserError: the module failed.
        Stopped: a signal stopped it.
    """
    if check is None:
        # An unhandled signal would end this process and leave the temporary directory behind.
        with Signals() as signals:
            return answer_of(name, module, job, signals.check)
    with tempfile.TemporaryDirectory(prefix="braid-") as temporary:
        path, result = Path(temporary) / "job.json", Path(temporary) / "result.json"
        write_atomically(path, json.dumps({**job, "result": str(result)}))
        child = Child(name, python_module(module, path), path.with_name("log"), hidden_gpus())
        try:
            while child.status() is None:
                check()
                wait_for_all([child], LOOK_SECONDS)
                for notice in child.notices():
                    say(notice)
            if child.status():
                failure = child.failure()
                raise UserError("\n".join([failure.cause, *failure.tail]))
            return json.loads(result.read_text())
        finally:
            kill([child])


def regrade(
    run: Run,
    stage: str,
    rows: Sequence[Mapping[str, Any]],
    check: Callable[[], None] | None = None,
    *,
    trusted: bool,
) -> list[dict[str, Any]]:
    """Return the `reward`, `parts`, `messages` and `failure` that samples of a stage earn now.

    `rows` have the columns of recorded samples. The rewards are those of run.yaml, in a process of
    their own; what they read (the code of a Python reward, a judge) may have changed since.
    `check`: see `answer_of`.

    Raises:
        UserError: others may have written the run, which names code, and it is not trusted; a
            sample has no problem, or a domain that the run has not; a problem is not in its
            domain's data any more; a reward cannot be made.
    """
    check_owner(run, trusted)
    settings = run.settings
    for row in rows:
        if row["problem"] is None or row["domain"] not in settings.domains:
            raise UserError(f"{stage}: a sample without a problem of a domain cannot be graded")
    [graph_stage] = run.chosen([stage])
    job = {
        "domains": {
            name: settings.domains[name].model_dump(mode="json")
            for name in dict.fromkeys(row["domain"] for row in rows)
        },
        **settings.model.tokenizer_keys,
        "pool": settings.rewards.model_dump(mode="json"),
        "seed": settings.seed,
        "stage": graph_stage.seeded_as,
        "samples": [
            {
                "domain": row["domain"],
                "problem": row["problem"],
                "response": row["response"],
                "tokens": row["tokens"],
                "finished": row["finish_reason"] == "stop",
            }
            for row in rows
        ],
    }
    grades: list[dict[str, Any]] = answer_of(
        "the grading", "stages.domain_tools.regrade", job, check
    )
    return grades
