"""Takes over from another run the stages that this one would make from the very same things."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from parallel.files import Checkpoint
from pipeline.config.violations import shown
from pipeline.run.directory import RunDirectory, StageDirectory
from pipeline.run.graph import Stage, compile_graph
from pipeline.run.ledger import Ledger, latest
from pipeline.run.lineage import Lineage, changes, lineage_from, read_manifest
from pipeline.run.states import damaged_verdict, derive, lacks
from pipeline.run.trust import exposure
from stages.settings import RunSettings

LEFT_BEHIND = (
    *("attempt_*", "rollouts", "models", "wandb", "tmp_step_*", "damaged_step_*"),
    *("stage.lock", "engine"),
)


@dataclass(frozen=True)
class RunFork:
    """What a run can take over from another one: `taken` are the stages' names, each with what the
    ledger is to say of it, and `held` those of stages that would be among them if a gate were done,
    with that gate."""

    taken: dict[str, str] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)


def find_fork(run: RunDirectory, settings: RunSettings, other: RunDirectory) -> RunFork:
    """Every finished stage of `other` whose settings, data and inputs are those of this run, and
    that has left nothing here. Writes nothing.

    A stage that waits for a gate is taken only where the gate is done here, or is itself taken with
    its verdict: else the gate is asked first.
    """
    stages = compile_graph(settings)
    events = latest(Ledger(other.ledger).events())
    here = derive(run, settings, stages)
    done = {name for name, state in here.items() if state.state == "done"}
    checkpoints: dict[str, Checkpoint | None] = {}
    found = RunFork()
    for stage in stages:  # what it waits for comes first
        ours, theirs = run.stage(stage.name), other.stage(stage.name)
        checkpoints[stage.name] = ours.newest_checkpoint()
        event = events.get(stage.name)
        if event is None or event.state != "done" or ours.path.exists():
            continue
        if stage.kind == "gate" and damaged_verdict(theirs, event):
            continue
        now = lineage_from(stage, checkpoints, settings.layout.model_dump())
        if not _is_what_would_be_made(stage, now, theirs):
            continue
        if asked := [gate for gate in stage.after if gate not in done]:
            found.held[stage.name] = asked[0]
            continue
        checkpoints[stage.name] = theirs.newest_checkpoint()
        done.add(stage.name)
        said = f": {event.cause}" if stage.kind == "gate" else ""
        found.taken[stage.name] = f"taken over from {shown(other.path)}{said}"
    return found


def take_over(run: RunDirectory, other: RunDirectory, fork: RunFork) -> None:
    """Take over what was found.

    Checkpoints are linked, not copied, where both runs lie on one file system: nobody writes into
    a whole one. Where other users may write to the other run they are copied: through a link, they
    could change what this run has. Raises OSError when the disk is full or not to be written.
    """
    ledger = Ledger(run.ledger)
    copy = _link_or_copy if exposure(other) is None else shutil.copy2
    for name, cause in fork.taken.items():
        _take_over(other.stage(name), run.stage(name), copy)
        ledger.append(name, "done", cause, 0)


def _is_what_would_be_made(stage: Stage, now: Lineage, theirs: StageDirectory) -> bool:
    manifest = read_manifest(theirs)
    if manifest is None or lacks(stage, theirs):
        return False
    return None not in now.parents.values() and not any(changes(manifest, now))


def _take_over(
    theirs: StageDirectory, ours: StageDirectory, copy: Callable[[str, str], object]
) -> None:
    """Whole or not at all: under another name until it is complete."""
    newest = theirs.newest_checkpoint()
    keep = newest.path.name if newest else None

    def left_behind(folder: str, names: list[str]) -> set[str]:
        ignored = shutil.ignore_patterns(*LEFT_BEHIND)(folder, names)
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
