"""The runs that a command line names: found, read, and checked for their owner."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection
from pathlib import Path

from parallel.errors import UserError, hint
from pipeline.config.validate import load_started, load_unfinished
from pipeline.run.answers import MeasuredModel, measured_models
from pipeline.run.directory import RunDirectory, check_owner
from pipeline.run.run import Run
from pipeline.run.select import to_start
from pipeline.text import shown, visible
from stages.settings import RunSettings


def find(runs_dir: Path, name: str) -> RunDirectory:
    """Return the run of a name or directory; raise UserError where there is none."""
    # A name in --runs-dir goes before a directory of the same name beside it.
    for path in (runs_dir / name, Path(name)):
        if (run := RunDirectory(path)).settings_file.exists():
            return run
    names = [visible(path.name) for path in run_paths(runs_dir)]
    raise UserError(f"no run {visible(name)} in {shown(runs_dir)}; {hint(name, names)}")


def run_paths(runs_dir: Path) -> list[Path]:
    """Return the directories of all runs."""
    return sorted(settings.parent for settings in runs_dir.glob("*/run.yaml"))


def read_run(directory: RunDirectory) -> Run:
    """Return the run in a directory that has a run.yaml, to show it.

    Raises:
        ConfigError: run.yaml cannot be read. That its stages could not start is no such error.
    """
    return Run(directory.path, load_started(directory.settings_file))


def load_run(arguments: Namespace) -> Run:
    """Return the run that the arguments name."""
    return read_run(find(arguments.runs_dir, arguments.run))


def measured(arguments: Namespace, run: Run, name: str) -> MeasuredModel:
    """Return a model that the run's evaluations have measured, or another run's: OTHER_RUN/MODEL.

    Raises:
        UserError: it has not been measured.
    """
    models = measured_models(run)
    other, slash, model = name.rpartition("/")
    if name not in models and slash:
        run = read_run(find(arguments.runs_dir, other))
        models, name = measured_models(run), model
    if name not in models:
        where = shown(run.path)
        raise UserError(f"no model {name} in {where} has been measured; {hint(name, models)}")
    return models[name]


def load_trusted_run(arguments: Namespace) -> Run:
    """Return the run that the arguments name, to work on what it has.

    Raises:
        UserError: other users may have written it, and it is not trusted.
    """
    run = find(arguments.runs_dir, arguments.run)
    check_owner(run, arguments.trust_run)
    return read_run(run)


def load_run_to_start(
    arguments: Namespace, only: Collection[str], rerun: Collection[str] = ()
) -> Run:
    """Return the run that the arguments name, to start its unfinished stages.

    `only` names the stages to start, `rerun` those to start again.

    Raises:
        ConfigError: with every violation that these stages meet.
        UserError: other users may have written the run, and it is not trusted.
    """
    directory = find(arguments.runs_dir, arguments.run)
    check_owner(directory, arguments.trust_run)

    def starting(settings: RunSettings) -> set[str]:
        return to_start(Run(directory.path, settings), only, rerun)

    return Run(directory.path, load_unfinished(directory.settings_file, (), starting))
