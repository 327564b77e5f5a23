"""A run: its directory, settings, stages, events and states, each computed once.

The state of a stage is derived from the ledger, its manifest and its checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Literal, TypeVar, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from parallel.errors import UserError, hint
from parallel.files import Checkpoint, read_text, write_atomically
from pipeline.config.read import check_readable
from pipeline.config.unroll import is_path
from pipeline.config.yaml_core import dump
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import Stage, compile_graph
from pipeline.run.ledger import RENAMED, Event, State, latest, minutes
from pipeline.run.lineage import (
    Lineage,
    changes,
    former_names,
    lineage_from,
    read_manifest,
    renamed,
)
from pipeline.run.metrics import Models, read_models
from pipeline.run.outside import outside_model
from pipeline.text import reason, shown
from stages.directory import StageDirectory, ended_early
from stages.settings import RunSettings

WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
STOPPED_MARK = "gate: "  # starts the verdict of a gate that stopped
KILLED = "its launcher was killed"  # the cause where an attempt has no end in the ledger
OVERRIDDEN = "overridden: "  # in the cause of a gate that a person has overridden

Outcome = Literal["passed", "warned", "stopped"]
OfModel = TypeVar("OfModel")


@dataclass(frozen=True)
class QueuedJob:
    """A job in Slurm's queue, as squeue shows it; `stage` is None where its comment names none."""

    number: str
    state: str
    reason: str
    elapsed: str
    limit: str
    nodes: str
    stage: str | None = None

    @property
    def waits(self) -> bool:
        return self.state in WAITING

    def describe(self) -> str:
        """Return the job's state in a few words."""
        if self.waits:
            return f"job {self.number} waits: {self.reason}"
        return f"job {self.number} on {self.nodes}, {self.elapsed} of {self.limit}"


@dataclass(frozen=True)
class GateVerdict:
    """The verdict of a gate, with the measured numbers as its reasons."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    outcome: Outcome
    reasons: Annotated[tuple[str, ...], Field(min_length=1)]

    @property
    def text(self) -> str:
        """The verdict as the ledger has it."""
        mark = STOPPED_MARK if self.outcome == "stopped" else f"{self.outcome}: "
        return f"{mark}{'; '.join(self.reasons)}"


VERDICT = TypeAdapter(GateVerdict)


class DamagedVerdict(UserError):
    """A verdict.json that no gate has written."""


@dataclass(frozen=True)
class StageState:
    """The state of a stage and its cause.

    `step` is the step of its newest whole checkpoint, `job` the number of its job in Slurm's queue.
    """

    state: State
    cause: str = ""
    attempts: int = 0
    step: int | None = None
    job: str | None = None


def has_stopped(state: StageState) -> bool:
    """Return whether a stage is a gate that has stopped."""
    return state.state == "failed" and state.cause.startswith(STOPPED_MARK)


@dataclass(frozen=True, eq=False)
class Run(RunDirectory):
    """A run directory with the settings of the run.

    `settings` and `stages` never change. `events` and `states` come from files that launchers
    write: they are read once, and again after `refresh`, which taking a lock of the run calls.
    """

    settings: RunSettings

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages in the order they run."""
        return compile_graph(self.settings)

    @cached_property
    def former(self) -> dict[str, str]:
        """The former names of stages whose work is not moved yet, by the names they have now."""
        return former_names(RunDirectory(self.path), self.stages)

    def stage(self, name: str) -> StageDirectory:
        """Return the directory of a stage: of its former name until its work is moved."""
        return super().stage(self.former.get(name, name))

    @cached_property
    def events(self) -> list[Event]:
        """The lines of the ledger; those of renamed stages under the names they have now."""
        names = {old: new for new, old in self.former.items()}
        return [
            replace(event, stage=names.get(event.stage, event.stage))
            for event in self.ledger.events()
            # A kill between this line and the move of the directory left both.
            if event.stage not in names or not event.cause.startswith(RENAMED)
        ]

    @cached_property
    def states(self) -> dict[str, StageState]:
        """Every stage's state by the files of the run; a submitted stage counts as waiting."""
        return self.states_with(None)

    def states_with(self, queue: Mapping[str, QueuedJob] | None) -> dict[str, StageState]:
        """Return every stage's state, in the order of the graph; each file is read once.

        `queue` has the jobs that Slurm still has; without it, a submitted stage counts as waiting.
        """
        newest = latest(self.events)
        layout = self.settings.layout.model_dump()
        states: dict[str, StageState] = {}
        checkpoints: dict[str, Checkpoint | None] = {}
        # A launcher that dies between sbatch and the ledger leaves a job that only its comment
        # names.
        jobs = {job.stage: job for job in (queue or {}).values()}  # by the jobs' comments
        for stage in self.stages:  # inputs come first
            directory = self.stage(stage.name)
            checkpoint = checkpoints[stage.name] = directory.output()
            left = _Output(self, stage, newest.get(stage.name), checkpoint, directory.attempts())
            state = left.state(partial(lineage_from, stage, checkpoints, layout), states)
            if state.state not in ("done", "stale"):  # no job changes these two
                state = left.queued_state(queue, jobs.get(stage.name)) or state
            states[stage.name] = state
        return states

    @cached_property
    def own_domains(self) -> dict[str, str]:
        """The domain of every stage that trained on it alone; an import takes no step."""
        trained = (stage for stage in self.stages if stage.trains and stage.steps)
        return {stage.name: stage.domain for stage in trained if stage.domain}

    def refresh(self) -> Run:
        """Forget the former names, events and states; the files of the run may have changed."""
        for name in ("former", "events", "states"):
            self.__dict__.pop(name, None)
        return self

    def lineage(self, stage: Stage) -> Lineage:
        """Return the lineage that a stage would have if it ran now."""
        checkpoints = {name: self.stage(name).output() for name in stage.inputs}
        return lineage_from(stage, checkpoints, self.settings.layout.model_dump())

    def chosen(self, names: Iterable[str]) -> list[Stage]:
        """Return the named stages in the order of the graph; all stages where no name is given.

        Raises:
            UserError: the run has no stage of a name.
        """
        by_name = {stage.name: stage for stage in self.stages}
        selected = set(names)
        for name in sorted(selected - by_name.keys()):
            raise UserError(f"{shown(self.path)} has no stage {name}; {hint(name, by_name)}")
        return [stage for stage in self.stages if not selected or stage.name in selected]

    def downstream(self, names: Iterable[str]) -> list[Stage]:
        """Return the named stages and all that depend on them, in the order of the graph."""
        reached = set(names)
        for stage in self.stages:  # inputs come first
            if not reached.isdisjoint(stage.inputs):
                reached.add(stage.name)
        return [stage for stage in self.stages if stage.name in reached]

    def write_settings(self) -> None:
        """Write run.yaml, with every default written out.

        Raises ConfigError where it would be too large to be read again.
        """
        # Defaults too: a later version with other defaults must resume the run as it was started.
        text = dump(self.settings.model_dump(mode="json"))
        check_readable(self.settings_file, text)
        write_atomically(self.settings_file, text)

    def write_results(self) -> Models:
        """Write results.json from the finished evaluations and the ledger.

        A stale evaluation is left out: its numbers are of other models, problems or rewards.

        Returns:
            {model: {domain: {"accuracy", "low", "high", "n"}}}

        Raises:
            UserError: the evaluation's results are damaged.
        """
        # Tasks of an array of evaluations may end at once: the last to write must have read all.
        with self.lock_results():
            models = self._evaluated()
            results = {"models": models, "minutes": minutes(self.ledger.events())}
            write_atomically(self.results, json.dumps(results, indent=2) + "\n")
        return models

    def _evaluated(self) -> Models:
        """Return the results of all evaluations, each of which may have measured other domains."""
        models: Models = {}
        states = self.refresh().states
        for stage in self.stages:
            path = self.stage(stage.name).results
            if not stage.declared.evaluates or states[stage.name].state != "done":
                continue
            if (evaluated := read_models(path)) is None:
                raise UserError(
                    f"{shown(path)} is damaged; rerun the evaluation with --from {stage.name}"
                )
            for model, domains in evaluated.items():
                models.setdefault(model, {}).update(domains)
        return self.in_order(models)

    def in_order(self, models: Mapping[str, OfModel]) -> dict[str, OfModel]:
        """Return models by name in the order of the plan; those of no stage come last."""
        ordered = (stage.name for stage in self.stages if stage.name in models)
        return {name: models[name] for name in dict.fromkeys([*ordered, *models])}

    def model_path(self, reference: str) -> Path:
        """Return the checkpoint that a reference of a stage means.

        Raises:
            UserError: there is none.
        """
        if not is_path(reference):
            return self.checkpoint_path(reference)
        if (checkpoint := outside_model(Path(reference))) is None:
            raise UserError(f"{reference}: no stage, checkpoint or Hugging Face checkpoint there")
        return checkpoint.path.absolute()

    @contextmanager
    def lock(self, shared: bool = False) -> Iterator[None]:
        with super().lock(shared):
            # Of an earlier version's command: the work of its stages has two names until it ends.
            if (left := self.path / "renaming.json").exists():
                raise UserError(
                    f"{shown(left)}: `braid mv` of an earlier version was interrupted; finish it"
                    " with that version, or remove the file to run the stages again"
                )
            self.refresh()
            yield

    @contextmanager
    def lock_submission(self) -> Iterator[int]:
        with super().lock_submission() as descriptor:
            self.refresh()
            yield descriptor


def as_done(states: Mapping[str, StageState], *these: State) -> dict[str, StageState]:
    """Return the states with every one of `these` replaced by done."""
    return {
        name: StageState("done") if state.state in these else state
        for name, state in states.items()
    }


def read_verdict(directory: StageDirectory) -> GateVerdict | None:
    """Return the verdict of a gate; None for other stages and a gate without a verdict yet.

    Raises:
        DamagedVerdict: verdict.json is not an outcome with its reasons.
    """
    path = directory.verdict
    try:
        return VERDICT.validate_python(json.loads(read_text(path)))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        why = f"not an outcome ({', '.join(get_args(Outcome))}) with its reasons"
        raise DamagedVerdict(f"{shown(path)}: damaged: {why}") from error
    except (OSError, ValueError, RecursionError) as error:
        why = reason(error) if isinstance(error, OSError) else f"not JSON ({error})"
        raise DamagedVerdict(f"{shown(path)}: damaged: {why}") from error


def damaged_verdict(directory: StageDirectory, event: Event) -> str | None:
    """Return what is wrong with the verdict of a judged gate; None where it is sound or overridden.

    A damaged verdict makes the gate run again.
    """
    if event.state not in ("done", "failed") or OVERRIDDEN in event.cause:
        return None
    try:
        read_verdict(directory)
    except DamagedVerdict as error:
        return f"{error}; the gate runs again"
    return None


@dataclass(frozen=True)
class _Output:
    """The output that attempts at a stage left behind, and its newest event in the ledger."""

    run: Run
    stage: Stage
    event: Event | None
    checkpoint: Checkpoint | None
    attempts: int

    def stands(self, state: State, cause: str = "", job: str | None = None) -> StageState:
        step = self.checkpoint.step if self.checkpoint else None
        return StageState(state, cause, self.attempts, step, job)

    def queued_state(
        self, queue: Mapping[str, QueuedJob] | None, unnamed: QueuedJob | None
    ) -> StageState | None:
        """Return the state of a stage that Slurm has, or had and lost; None for other stages.

        `unnamed` is a job of the stage that the ledger may not name.
        """
        event = self.event
        number = event.job if event is not None and event.state != "done" else None
        job = (queue or {}).get(number) if number is not None else None
        if (job := job or unnamed) is not None:
            return self.stands("submitted" if job.waits else "running", job.describe(), job.number)
        if event is None or event.job is None or event.state != "submitted":
            return None
        if queue is None:
            return self.stands("submitted", event.cause, event.job)
        cause = f"job {event.job} left the queue before it started"
        if output := self.run.output_of(event.job):
            cause = f"job {event.job} ended before the stage started; see {shown(output)}"
        return self.stands("failed", cause, event.job)

    def state(self, now: Callable[[], Lineage], earlier: Mapping[str, StageState]) -> StageState:
        """Return the state by the files of the run; `earlier` has the states of its inputs."""
        event, stage, directory = self.event, self.stage, self.run.stage(self.stage.name)
        # Unfinished work is compared with its lineage too: to resume it under other settings would
        # mix two stages in one.
        has_work = directory.measured.exists() if stage.measures else self.checkpoint is not None
        has_work = has_work or directory.drawn.exists()
        if event is None and not has_work:
            return StageState("pending", attempts=self.attempts)
        done = event is not None and event.state == "done"
        recorded = read_manifest(directory)
        if recorded is None:
            if directory.manifest.exists() or self.checkpoint is not None:
                return self.stands("stale", "its manifest.json is missing or damaged")
            # It may have failed before its first attempt.
            cause = event.cause if event is not None and event.state == "failed" else ""
            return StageState("pending", cause, self.attempts)
        if self.run.former:  # inputs that are renamed, and not moved yet
            names = {old: new for new, old in self.run.former.items()}
            recorded = renamed(recorded, names, stage.reads)
        if done or has_work:
            reasons = list(changes(recorded, now()))
            reasons += [
                f"its input {name} is {earlier[name].state}"
                for name in stage.inputs
                if earlier[name].state != "done" and event is not None
            ]
            missing = missing_output(stage, directory, self.checkpoint) if done else None
            # With an older checkpoint the stage resumes from that; without any, the ledger says
            # done of a stage that has nothing.
            if missing and self.checkpoint is None:
                reasons.append(missing)
            if reasons:
                return self.stands("stale", "; ".join(reasons))
            if missing:  # a damaged last checkpoint was removed, and an older one is still there
                return self.stands("pending", missing)
        if event is None:
            return self.stands("pending", "it has output but no line in the ledger")
        if stage.declared.judges and (damage := damaged_verdict(directory, event)):
            return self.stands("pending", damage)
        if event.state == "running" and not self.run.is_running(stage.name):
            return self.stands("failed", KILLED)
        return self.stands(event.state, event.cause)


def missing_output(
    stage: Stage, directory: StageDirectory, checkpoint: Checkpoint | None
) -> str | None:
    """Return which output of a stage that should be done is missing; None if it is complete.

    `checkpoint` is its newest one.
    """
    if stage.measures:
        return None if directory.results.exists() else "its results.json is missing"
    if stage.declared.exports:
        return None if directory.exported.exists() else "its exported model is missing"
    if stage.declared.collects:
        return None if directory.output() else "its collection.json is missing"
    if checkpoint is None:
        return "it has no checkpoint"
    if checkpoint.step != stage.steps and ended_early(checkpoint) is None:
        return f"its newest checkpoint is at step {checkpoint.step} of {stage.steps}"
    return None
