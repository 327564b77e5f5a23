"""The stages that a command runs, reruns and reuses, and the checks on what it would build on."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from parallel.errors import UserError
from parallel.files import Checkpoint
from pipeline.config.tokenizers import is_dated
from pipeline.config.validate import differing_keys, load_started
from pipeline.run.directory import RunDirectory, exposure
from pipeline.run.graph import Stage, rerun_options
from pipeline.run.ledger import PUT_ASIDE, latest
from pipeline.run.lineage import changes, lineage_from, read_manifest
from pipeline.run.run import Run, StageState, as_done, damaged_verdict, missing_output
from pipeline.text import say, shown, visible
from stages.directory import StageDirectory
from stages.keys import ENGINE_KEYS, LOOP_KEYS, NON_INVALIDATING_KEYS, TEACHER_KEYS, matches

MAY_CHANGE = f"""\
  logging
  launch
  layout
  rewards: workers, timeout_seconds, memory_mebibytes, max_failed_fraction
  engine: {", ".join(ENGINE_KEYS[:6])},
          {", ".join(ENGINE_KEYS[6:10])},
          {", ".join(ENGINE_KEYS[10:13])},
          {", ".join(ENGINE_KEYS[13:])}
  every domain and stage: guards
  every stage: after, {", ".join(TEACHER_KEYS)}
  every loop: {", ".join(LOOP_KEYS)}"""


DATE = "model.chat_template_date"
UNDATED = (
    "its chat template showed the day on which it ran, which the other run, of an older version, "
    "did not record"
)


class StaleStages(UserError):
    """Finished or half-finished stages whose settings or inputs changed."""

    def __init__(self, run: Run, stale: dict[str, StageState]) -> None:
        lines = [f"{name}: {state.cause}" for name, state in stale.items()]
        options = rerun_options(run.stages, stale)
        super().__init__(
            "\n  ".join(["stale: settings or inputs changed:", *lines])
            + f"\nrestore what changed, or rerun with {options}, which also "
            f"reruns\neverything downstream; old outputs move to {shown(run.replaced)}"
        )


def check_selection(
    run: Run, only: Iterable[str], rerun: Sequence[str], reused: Collection[str] = ()
) -> None:
    """Raise UserError where `only` or `rerun` names no stage, or one with missing dependencies.

    Dependencies are checked as they will be: the `reused` stages done, those to `rerun` pending.
    """
    selected = run.chosen(only)
    run.chosen(rerun)
    # `check_stale` refuses stale stages.
    check_dependencies(selected, as_done(planned_states(run, run.states, reused, rerun), "stale"))


def check_dependencies(
    selected: Sequence[Stage],
    states: Mapping[str, StageState],
    remedy: str = "add them with --only, or run without --only",
) -> None:
    """Raise UserError where a wanted stage depends on one that will not be done."""
    running = {stage.name for stage in selected}
    lines = [
        f"  {stage.name} {'waits for' if name in stage.after else 'needs'} {name}, which is "
        f"{states[name].state}"
        for stage in selected
        if states[stage.name].state != "done"
        for name in stage.waits_for
        if states[name].state != "done" and name not in running
    ]
    if lines:
        raise UserError("\n".join(["missing dependencies:", *lines, remedy]))


def check_stale(run: Run, selected: Sequence[Stage], *, record: bool = True) -> None:
    """Raise StaleStages where a wanted stage, or an input of one, is stale.

    `record` also writes the refusal into the ledger.
    """
    stale = stale_among(run.states, selected)
    for name, state in stale.items() if record else ():
        run.ledger.append(name, "stale", state.cause, state.attempts)
    if stale:
        raise StaleStages(run, stale)


def check_settings(
    run: Run, rerun: Sequence[str], moved_lines: Callable[[Run], Sequence[str]]
) -> None:
    """Raise UserError where stages have output of other settings and are not in `rerun`.

    `run` has the requested settings; its run.yaml has the settings of the output. The message has
    the lines that `moved_lines` gives, of deleted and renamed stages.
    """
    if not run.settings_file.exists():
        return
    differing = differing_keys(load_started(run.settings_file), run.settings)
    if not differing:
        say(f"{shown(run.path)} was started with the same config: resuming it")
        return
    lines = [
        f"  {key}: {json.dumps(there)} there, {json.dumps(here)} here"
        for key, (there, here) in differing.items()
    ]
    stale = [name for name, state in run.states.items() if state.state == "stale"]
    if not set(stale) - {stage.name for stage in run.downstream(rerun)}:
        say(f"resuming {shown(run.path)} with other settings:", *lines, *moved_lines(run))
        return
    # The stages were stale before this change, so the message about them is the right one.
    if all(any(matches(key, pattern) for pattern in NON_INVALIDATING_KEYS) for key in differing):
        check_stale(run, run.stages, record=False)
    raise UserError(
        "\n".join(
            [f"{shown(run.path)} was started with a different config:", *lines, *moved_lines(run)]
        )
        + f"\nthese finished or started stages depend on it: {', '.join(stale)}"
        + "\nchoose another name with --name NAME, resume with the original settings with "
        + f"`{run.resume_command()}`,\nor rerun the dependent stages with "
        + f"{rerun_options(run.stages, stale)};\n"
        + f"without a rerun, only these settings may change:\n{MAY_CHANGE}"
    )


def check_run_directory(config: Path, run: RunDirectory) -> None:
    """Raise UserError where `config` is the run.yaml of a started run in another directory.

    A run is found by its name, and a directory that was copied or moved keeps the name in its
    run.yaml: without this check its settings would resume the original.
    """
    origin = RunDirectory(config.parent)
    started = origin.ledger.path.exists() or origin.lock_file.exists()
    if config.name != origin.settings_file.name or not started:
        return
    if origin.path.resolve() == run.path.resolve():
        return
    source, destination = origin.path.resolve(), run.path.absolute()
    options = [f"--name {visible(source.name)}"] if source.name != destination.name else []
    if source.parent != destination.parent.resolve():
        options.append(f"--runs-dir {shown(source.parent)}")
    there, here = shown(source), shown(run.path)
    effect = "resume" if run.settings_file.exists() else "start"
    raise UserError(
        f"{shown(config)} belongs to the run in {there}, but its name is {visible(run.name)} and "
        f"would {effect} {here}\n"
        f"to resume {there}: braid resume {there}, or add {' '.join(options)}\n"
        f"to start a new run from it: add --name NAME --fork {there}"
    )


def planned_states(
    run: Run, states: Mapping[str, StageState], reused: Iterable[str], rerun: Iterable[str]
) -> dict[str, StageState]:
    """Return the states once the `reused` stages are done and those to `rerun` are put aside."""
    done = dict.fromkeys(reused, StageState("done"))
    pending = {stage.name: StageState("pending") for stage in run.downstream(rerun)}
    return {**states, **done, **pending}


def unfinished(stages: Iterable[Stage], states: Mapping[str, StageState]) -> list[Stage]:
    """Return the stages that are not done, and so will run."""
    return [stage for stage in stages if states[stage.name].state != "done"]


def to_start(run: Run, only: Collection[str], rerun: Collection[str]) -> set[str]:
    """Return the names of the stages that are not done, or rerun; of `only`, if it names any."""
    states = planned_states(run, run.states, (), rerun)
    names = {stage.name for stage in unfinished(run.stages, states)}
    return names & {*only} if only else names


def dated(run: Run, fork: RunDirectory | None = None) -> Run:
    """Return the run with the date that its chat template shows, if it shows one.

    That is the date of the run's first start, or of the run that it reuses stages of: after
    midnight its prompts must be the same. A run that an older version started has none: a date of
    today would make its finished stages stale.
    """
    model = run.settings.model
    if model.chat_template_date is not None or not is_dated(model):
        return run
    if run.settings_file.exists():
        day = _recorded_date(run)
    else:
        day = (_recorded_date(fork) if fork else None) or date.today()
    model = model.model_copy(update={"chat_template_date": day})
    return Run(run.path, run.settings.model_copy(update={"model": model}))


def _recorded_date(run: RunDirectory) -> date | None:
    return load_started(run.settings_file).model.chat_template_date


def stale_among(
    states: Mapping[str, StageState], selected: Sequence[Stage]
) -> dict[str, StageState]:
    """Return the stale stages among the wanted ones and their inputs."""
    touched = {name for stage in selected for name in (stage.name, *stage.inputs)}
    return {
        name: state for name, state in states.items() if name in touched and state.state == "stale"
    }


def put_aside(run: Run, stages: Iterable[Stage]) -> list[Path]:
    """Move the output of stages to `replaced/`, so that they start over; return the new paths."""
    moved = []
    for stage in stages:
        directory = run.stage(stage.name).path
        if not directory.exists():
            continue
        taken = [path.suffix[1:] for path in run.replaced.glob(f"{stage.name}.*")]
        # Not the count of those there: a person may have deleted one, and none may be overwritten.
        number = 1 + max((int(suffix) for suffix in taken if suffix.isdecimal()), default=0)
        to = run.replaced / f"{stage.name}.{number}"
        to.parent.mkdir(exist_ok=True)
        directory.rename(to)
        run.ledger.append(stage.name, "pending", f"{PUT_ASIDE}{shown(to)}", 0)
        moved.append(to)
    run.refresh()
    return moved


LEFT_BEHIND = (
    *("attempt_*", "rollouts", "routing", "models", "wandb", "tensorboard", "tracker_id"),
    *("tmp_step_*", "damaged_step_*", "stage.lock", "engine"),
)


@dataclass(frozen=True)
class RunFork:
    """The stages that a run can reuse from another one, each with its cause for the ledger.

    `held` maps the stages that could be reused if a gate were done to that gate.
    """

    reused: dict[str, str] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)
    differing: dict[str, str] = field(default_factory=dict)


def find_fork(run: Run, other: RunDirectory) -> RunFork:
    """Return the finished stages of `other` that would be identical here and have no output here.

    A stage that waits for a gate is reused only where the gate is done here, or is reused with its
    verdict: otherwise the gate runs first.
    """
    events = latest(other.ledger.events())
    done = {name for name, state in run.states.items() if state.state == "done"}
    checkpoints: dict[str, Checkpoint | None] = {}
    fork = RunFork()
    for stage in run.stages:  # dependencies come first
        ours, theirs = run.stage(stage.name), other.stage(stage.name)
        checkpoints[stage.name] = ours.output()
        event = events.get(stage.name)
        if event is None or event.state != "done" or ours.path.exists():
            continue
        if stage.declared.judges and damaged_verdict(theirs, event):
            continue
        now = lineage_from(stage, checkpoints, run.settings.layout.model_dump())
        # An input that is neither here nor reused has no digest yet, which `changes` would take as
        # equal.
        if (manifest := read_manifest(theirs)) is None or None in now.parents.values():
            continue
        newest = theirs.output()
        if missing_output(stage, theirs, newest):
            continue
        if differing := next(changes(manifest, now), None):
            undated = manifest.settings.get(DATE, "") is None and now.settings.get(DATE) is not None
            fork.differing[stage.name] = UNDATED if undated else differing
            continue
        if pending_gates := [gate for gate in stage.after if gate not in done]:
            fork.held[stage.name] = pending_gates[0]
            continue
        checkpoints[stage.name] = newest
        done.add(stage.name)
        verdict = f": {event.cause}" if stage.declared.judges else ""
        fork.reused[stage.name] = f"reused from {shown(other.path)}{verdict}"
    return fork


def reuse_stages(run: Run, other: RunDirectory, fork: RunFork) -> None:
    """Copy the stages of a fork from the other run and record them as done.

    Checkpoints are hard-linked where both runs are on one file system, since a whole checkpoint
    never changes. If other users may write to the other run they are copied: through a link, those
    users could change this run.

    Raises:
        OSError: the disk is full or not writable.
    """
    copy = _link_or_copy if exposure(other) is None else shutil.copy2
    for name, cause in fork.reused.items():
        _copy_stage(other.stage(name), run.stage(name), copy)
        run.ledger.append(name, "done", cause, 0)
    run.refresh()


def _copy_stage(
    theirs: StageDirectory, ours: StageDirectory, copy: Callable[[str, str], object]
) -> None:
    """Copy a stage's output, under another name until it is complete."""
    newest = theirs.newest_checkpoint()
    keep = newest.path.name if newest else None

    def left_behind(directory: str, names: list[str]) -> set[str]:
        ignored = shutil.ignore_patterns(*LEFT_BEHIND)(directory, names)
        older = [name for name in names if name.startswith("step_") and name != keep]
        return {*ignored, *older}

    # Names with a dot are no stages: a copy that a kill cut short is never taken for one.
    unfinished = ours.path.with_name(f".{ours.path.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(theirs.path, unfinished, ignore=left_behind, copy_function=copy)
    unfinished.rename(ours.path)


def _link_or_copy(source: str, target: str) -> None:
    if Path(source).parent.name.startswith("step_"):
        with suppress(OSError):  # another file system, or one without links
            os.link(source, target)
            return
    shutil.copy2(source, target)
