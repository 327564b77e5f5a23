"""A run: its directory, settings, stages, events and states, each computed once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from parallel.files import write_atomically
from pipeline.config.validate import dump_resolved, load
from pipeline.config.violations import hint, shown
from pipeline.errors import BraidError
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import Stage, compile_graph
from pipeline.run.ledger import Event
from pipeline.run.lineage import Lineage, lineage_from
from pipeline.run.states import QueuedJob, StageState, derive
from stages.settings import RunSettings


@dataclass(frozen=True, eq=False)
class Run(RunDirectory):
    """A run directory with the settings of the run.

    `settings` and `stages` never change. `events` and `states` come from files that launchers
    write: they are read once, and again after `refresh`, which taking a lock of the run calls.
    """

    settings: RunSettings

    @classmethod
    def read(cls, path: Path, *, check_environment: bool = False) -> Run:
        """Return the run in a directory that has a run.yaml.

        `check_environment` also checks the files and modules that its stages will need.

        Raises:
            ConfigError: with every violation in run.yaml.
        """
        file = RunDirectory(path).settings_file
        return cls(path, load(file, to_start=check_environment))

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages in the order they run."""
        return compile_graph(self.settings)

    @cached_property
    def events(self) -> list[Event]:
        """The lines of the ledger."""
        return self.ledger.events()

    @cached_property
    def states(self) -> dict[str, StageState]:
        """Every stage's state by the files of the run; a submitted stage counts as waiting."""
        return self.states_with(None)

    def states_with(self, queue: Mapping[str, QueuedJob] | None) -> dict[str, StageState]:
        """Return every stage's state, given the run's jobs in Slurm's `queue`."""
        return derive(self, self.stages, self.settings.layout.model_dump(), self.events, queue)

    def refresh(self) -> Run:
        """Forget the events and states; the files of the run may have changed."""
        for name in ("events", "states"):
            self.__dict__.pop(name, None)
        return self

    def lineage(self, stage: Stage) -> Lineage:
        """Return the lineage that a stage would have if it ran now."""
        checkpoints = {name: self.stage(name).newest_checkpoint() for name in stage.inputs}
        return lineage_from(stage, checkpoints, self.settings.layout.model_dump())

    def chosen(self, names: Iterable[str]) -> list[Stage]:
        """Return the named stages in the order of the graph; all stages where no name is given.

        Raises:
            BraidError: the run has no stage of a name.
        """
        known = {stage.name: stage for stage in self.stages}
        wanted = set(names)
        for name in sorted(wanted - known.keys()):
            raise BraidError(f"{shown(self.path)} has no stage {name}; {hint(name, known)}")
        return [stage for stage in self.stages if not wanted or stage.name in wanted]

    def downstream(self, names: Iterable[str]) -> list[Stage]:
        """Return the named stages and all that depend on them, in the order of the graph."""
        found = set(names)
        for stage in self.stages:  # inputs come first
            if found & set(stage.inputs):
                found.add(stage.name)
        return [stage for stage in self.stages if stage.name in found]

    def write_settings(self) -> None:
        """Write run.yaml, with every default written out."""
        write_atomically(self.settings_file, dump_resolved(self.settings))

    @contextmanager
    def lock(self, shared: bool = False) -> Iterator[None]:
        with super().lock(shared):
            self.refresh()
            yield

    @contextmanager
    def lock_submission(self) -> Iterator[int]:
        with super().lock_submission() as descriptor:
            self.refresh()
            yield descriptor


def check_run_directory(config: Path, run: RunDirectory) -> None:
    """Raise BraidError where `config` is the run.yaml of a started run in another directory.

    A run is found by its name, and a directory that was copied or moved keeps the name in its
    run.yaml: without this check its settings would resume the original.
    """
    own = RunDirectory(config.parent)
    started = own.ledger.path.exists() or own.lock_file.exists()
    if config.name != own.settings_file.name or not started:
        return
    if own.path.resolve() == run.path.resolve():
        return
    there, here = shown(own.path.resolve()), shown(run.path)
    effect = "resume" if run.settings_file.exists() else "start"
    raise BraidError(
        f"{shown(config)} belongs to the run in {there}, but its name is {run.name} and would "
        f"{effect} {here}\n"
        f"to resume {there}: braid resume {there}, or add {_options(own, run)}\n"
        f"to start a new run from it: add --name NAME --fork {there}"
    )


def _options(own: RunDirectory, run: RunDirectory) -> str:
    """Return the options that make a configuration of `run` work on `own`."""
    wanted, given = own.path.resolve(), run.path.absolute()
    options = [f"--name {wanted.name}"] if wanted.name != given.name else []
    if wanted.parent != given.parent.resolve():
        options.append(f"--runs-dir {shown(wanted.parent)}")
    return " ".join(options)
