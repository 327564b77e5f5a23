"""The files a stage's processes and the engine are started with."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

from parallel.files import write_atomically
from parallel.settings import EngineSettings, ModelSettings
from pipeline.errors import BraidError
from pipeline.graph import Stage
from pipeline.run_directory import RunDirectory, StageDirectory
from pipeline.violations import shown
from stages.settings import RunSettings, StageJob


class MissingCheckpoint(BraidError):
    """A checkpoint is needed that no stage has written."""


class EngineJob(BaseModel):
    """What the engine process reads; it writes the file `address` when it is ready."""

    model: ModelSettings
    engine: EngineSettings
    address: Path
    seed: int


def engine_address(run: RunDirectory) -> Path:
    """Where the run's engine says how to reach it."""
    return (run.engine / "address.json").absolute()


def stage_job(stage: Stage, settings: RunSettings, run: RunDirectory, attempt: int) -> StageJob:
    """The job of one attempt at a stage of the graph."""
    directory = run.stage(stage.name)
    return StageJob(
        stage=stage.name,
        kind=stage.kind,
        domain=stage.domain,
        directory=directory.path.absolute(),
        attempt=attempt,
        parent=checkpoint_path(run, stage.parent) if stage.parent else None,
        teachers={key: checkpoint_path(run, name) for key, name in stage.teachers.items()},
        models={key: checkpoint_path(run, name) for key, name in stage.models.items()},
        output=directory.exported.absolute() if stage.kind == "export" else None,
        engine_address=engine_address(run) if stage.needs_engine else None,
        settings=settings,
    )


def checkpoint_path(run: RunDirectory, stage: str) -> Path:
    """The newest whole checkpoint of a stage.

    Raises:
        MissingCheckpoint: the stage has none.
    """
    found = run.stage(stage).newest_checkpoint()
    if found is None:
        raise MissingCheckpoint(f"stage {stage} of {shown(run.path)} has no checkpoint yet")
    return found.path.absolute()


def write_stage_job(job: StageJob) -> Path:
    """Write the job into its attempt's folder."""
    path = StageDirectory(job.directory).job(job.attempt)
    write_atomically(path, job.model_dump_json(indent=2) + "\n")
    return path


def write_engine_job(run: RunDirectory, settings: RunSettings) -> Path:
    """Write the engine's job; its seed is the run's."""
    job = EngineJob(
        model=settings.model,
        engine=settings.engine,
        address=engine_address(run),
        seed=settings.seed,
    )
    path = run.engine / "engine.json"
    write_atomically(path, job.model_dump_json(indent=2) + "\n")
    return path.absolute()
