"""The configuration that a command line names: its settings, run, warnings and fit on a machine."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Sequence

from parallel.errors import UserError
from pipeline.commands.support.runs import find
from pipeline.config.cautions import graph_cautions
from pipeline.config.validate import load, load_cluster, load_unfinished, located
from pipeline.estimate.capacity import check_capacity, machine_shares
from pipeline.estimate.stage_memory import GpusOf, gpus_here, gpus_of, unchecked
from pipeline.run.bundle.reproduce import bundle_at
from pipeline.run.directory import RunDirectory, check_owner
from pipeline.run.graph import Stage
from pipeline.run.run import Run
from pipeline.run.select import (
    RunFork,
    check_run_directory,
    dated,
    find_fork,
    planned_states,
    to_start,
    unfinished,
)
from pipeline.slurm.submit import check_engines
from pipeline.text import warn
from stages.settings import RunSettings


def load_configured_run(arguments: Namespace) -> Run:
    """Return the run of the configuration that the arguments name.

    Raises:
        UserError: the configuration belongs to a run in another directory.
    """
    # `braid plan` has neither of these options, nor --fork.
    only, rerun = getattr(arguments, "only", ()), getattr(arguments, "rerun", ())

    def starting(settings: RunSettings) -> set[str] | None:
        run = dated(Run(arguments.runs_dir / settings.name, settings))
        return to_start(run, only, rerun) if run.settings_file.exists() else None

    settings = load_config(arguments, starting=starting)
    run = Run(arguments.runs_dir / settings.name, settings)
    if arguments.name is None and not any(
        override.startswith("name=") for override in arguments.overrides
    ):
        check_run_directory(arguments.config, run)
    fork = getattr(arguments, "fork", None)
    return dated(run, None if fork is None else find(arguments.runs_dir, fork))


def load_config(
    arguments: Namespace,
    *,
    to_start: bool = True,
    starting: Callable[[RunSettings], Collection[str] | None] | None = None,
) -> RunSettings:
    """Return the settings of a configuration, with the overrides of the command line.

    Of a bundle, those of its configuration; the arguments then name that, and the `bundle`.
    `to_start` and `starting` are as in `load` and `load_unfinished`.

    Raises:
        UserError: an input of the bundle is missing or differs.
    """
    arguments.bundle = bundle_at(arguments.config)
    overrides = _overrides(arguments)
    if arguments.bundle is not None:
        arguments.config = arguments.bundle.config
        # Not `to_start`, whose rules would report a missing input first, without naming the bundle.
        arguments.bundle.check_inputs(load(arguments.config, overrides, to_start=False))
    if starting is not None:
        return load_unfinished(arguments.config, overrides, starting)
    return load(arguments.config, overrides, to_start=to_start)


def _overrides(arguments: Namespace) -> list[str]:
    name = [] if arguments.name is None else [f"name={json.dumps(arguments.name)}"]
    return [*arguments.overrides, *name, *getattr(arguments, "implied", [])]


def cautions_of(arguments: Namespace, cautions: Iterable[tuple[str, str]]) -> list[str]:
    """Return each (dotted key, message) about the configuration, with file and line."""
    return located(arguments.config, _overrides(arguments), cautions)


def warn_of_graph(arguments: Namespace, settings: RunSettings) -> None:
    """Warn on standard error of `graph_cautions`."""
    warn(cautions_of(arguments, graph_cautions(settings)))


def known_gpus(arguments: Namespace, settings: RunSettings) -> GpusOf:
    """Return the GPUs of `--cluster`'s profile, or without one this machine's."""
    return gpus_of(load_cluster(arguments.cluster)) if arguments.cluster else gpus_here(settings)


def check_cluster_engines(
    arguments: Namespace, settings: RunSettings, stages: Sequence[Stage]
) -> None:
    """Raise UserError where `braid submit` would refuse the engines on `--cluster`'s nodes."""
    if arguments.cluster:
        check_engines(settings, load_cluster(arguments.cluster), stages)


def too_large(settings: RunSettings, stages: Sequence[Stage], arguments: Namespace) -> list[str]:
    """Return why `braid run` would refuse stages for this machine's memory, or none can tell.

    Raises:
        UserError: the GPUs of `--cluster`'s profile have too little.
    """
    try:
        check_capacity(settings, stages, known_gpus(arguments, settings))
    except UserError as error:
        if arguments.cluster is not None:
            raise
        return [f"braid run is refused on this machine: {error}"]
    if arguments.cluster is None:
        return []
    return unchecked(load_cluster(arguments.cluster), arguments.cluster, stages)


def forked(arguments: Namespace, run: Run) -> tuple[RunDirectory | None, RunFork]:
    """Return the run that `--fork` names, and the stages of it that `run` can reuse.

    Raises:
        UserError: other users may have written the run, and it is not trusted.
    """
    if arguments.fork is None:
        return None, RunFork()
    other = find(arguments.runs_dir, arguments.fork)
    check_owner(other, arguments.trust_run)
    return other, find_fork(run, other)


def check_machine(run: Run, arguments: Namespace, reused: Iterable[str] = ()) -> None:
    """Raise UserError where this machine has too little for the stages that will run."""
    states = planned_states(run, run.states, reused, arguments.rerun)
    if stages := unfinished(run.chosen(arguments.only), states):
        check_capacity(run.settings, stages, gpus_here(run.settings, arguments.parallel))
        machine_shares(arguments.parallel, run.settings, stages)
