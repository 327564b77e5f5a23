"""The files a stage's processes and the engines are started with."""

from __future__ import annotations

from pathlib import Path

from parallel.files import write_atomically
from parallel.settings import EngineJob
from pipeline.config.violations import shown
from pipeline.errors import BraidError
from pipeline.run.directory import EngineDirectory, RunDirectory, StageDirectory
from pipeline.run.gates import gate_of
from pipeline.run.graph import Stage
from stages.settings import RunSettings, StageJob


class MissingCheckpoint(BraidError):
    """A checkpoint is needed that no stage has written."""


def stage_job(stage: Stage, settings: RunSettings, run: RunDirectory, attempt: int) -> StageJob:
    """The job of one attempt at a stage of the graph; a launcher adds where its engines are."""
    directory = run.stage(stage.name)
    if stage.kind == "gate":
        asked = {"problems": gate_of(stage, settings).problems, "samples_per_problem": 1}
        evaluation = settings.evaluation.model_copy(update=asked)
        settings = settings.model_copy(update={"evaluation": evaluation})
    return StageJob(
        stage=stage.name,
        kind=stage.kind,
        domain=stage.domain,
        directory=directory.path.absolute(),
        attempt=attempt,
        parent=checkpoint_path(run, stage.parent) if stage.parent else None,
        teachers={key: checkpoint_path(run, name) for key, name in stage.teachers.items()},
        models={key: checkpoint_path(run, name) for key, name in stage.models.items()},
        evaluated_on=stage.evaluated_on,
        output=directory.exported.absolute() if stage.kind == "export" else None,
        samples=stage.needs_engine,
        settings=settings,
    )


def checkpoint_path(run: RunDirectory, stage: str, step: int | None = None) -> Path:
    """The newest whole checkpoint of a stage, or that of a step.

    Raises:
        MissingCheckpoint: the stage has none, or none of that step.
    """
    directory = run.stage(stage)
    found = directory.newest_checkpoint() if step is None else directory.checkpoint(step)
    if found is not None:
        return found.path.absolute()
    message = f"stage {stage} of {shown(run.path)} has no checkpoint"
    if not (steps := directory.whole_steps()):
        raise MissingCheckpoint(f"{message} yet")
    kept = ", ".join(map(str, steps))
    raise MissingCheckpoint(
        f"{message} of step {step}: whole are those of step{'s' * (len(steps) > 1)} {kept}"
    )


def write_stage_job(job: StageJob) -> Path:
    """Write the job into its attempt's folder."""
    path = StageDirectory(job.directory).job(job.attempt)
    write_atomically(path, job.model_dump_json(indent=2) + "\n")
    return path


def write_engine_job(
    directory: EngineDirectory, settings: RunSettings, index: int, interface: str
) -> Path:
    """Write one engine's job; its seed is the run's."""
    job = EngineJob(
        model=settings.model,
        engine=settings.engine,
        index=index,
        address=directory.address.absolute(),
        interface=interface,
        seed=settings.seed,
    )
    write_atomically(directory.job, job.model_dump_json(indent=2) + "\n")
    return directory.job.absolute()
