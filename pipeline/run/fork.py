"""Reuse of another run's finished stages whose settings, data and inputs are identical."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from parallel.files import Checkpoint
from pipeline.config.violations import shown
from pipeline.run.directory import RunDirectory, StageDirectory
from pipeline.run.graph import Stage
from pipeline.run.ledger import latest
from pipeline.run.lineage import Lineage, changes, lineage_from, read_manifest
from pipeline.run.run import Run
from pipeline.run.states import damaged_verdict, missing_output
from pipeline.run.trust import exposure

LEFT_BEHIND = (
    *("attempt_*", "rollouts", "models", "wandb", "tmp_step_*", "damaged_step_*"),
    *("stage.lock", "engine"),
)


@dataclass(frozen=True)
class RunFork:
    """The stages that a run can reuse from another one, each with its cause for the ledger.

    `held` maps the stages that could be reused if a gate were done to that gate.
    """

    reused: dict[str, str] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)


def find_fork(run: Run, other: RunDirectory) -> RunFork:
    """Return the finished stages of `other` that would be identical here and have no output here.

    A stage that waits for a gate is reused only where the gate is done here, or is reused with its
    verdict: otherwise the gate runs first.
    """
    events = latest(other.ledger.events())
    done = {name for name, state in run.states.items() if state.state == "done"}
    checkpoints: dict[str, Checkpoint | None] = {}
    found = RunFork()
    for stage in run.stages:  # dependencies come first
        ours, theirs = run.stage(stage.name), other.stage(stage.name)
        checkpoints[stage.name] = ours.newest_checkpoint()
        event = events.get(stage.name)
        if event is None or event.state != "done" or ours.path.exists():
            continue
        if stage.kind == "gate" and damaged_verdict(theirs, event):
            continue
        now = lineage_from(stage, checkpoints, run.settings.layout.model_dump())
        if not _is_identical(stage, now, theirs):
            continue
        if asked := [gate for gate in stage.after if gate not in done]:
            found.held[stage.name] = asked[0]
            continue
        checkpoints[stage.name] = theirs.newest_checkpoint()
        done.add(stage.name)
        said = f": {event.cause}" if stage.kind == "gate" else ""
        found.reused[stage.name] = f"reused from {shown(other.path)}{said}"
    return found


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


def _is_identical(stage: Stage, now: Lineage, theirs: StageDirectory) -> bool:
    manifest = read_manifest(theirs)
    if manifest is None or missing_output(stage, theirs):
        return False
    return None not in now.parents.values() and not any(changes(manifest, now))


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

    unfinished = ours.path.with_name(f".{ours.path.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(theirs.path, unfinished, ignore=left_behind, copy_function=copy)
    unfinished.rename(ours.path)


def _link_or_copy(source: str, target: str) -> None:
    if Path(source).parent.name.startswith("step_"):
        try:
            os.link(source, target)
            return
        except OSError:  # another file system, or one without links
            pass
    shutil.copy2(source, target)
