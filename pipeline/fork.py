"""Takes over from another run the stages that this one would make from the very same things."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pipeline.graph import Stage, compile_graph
from pipeline.ledger import Ledger, latest
from pipeline.lineage import changes, lineage_now, read_manifest
from pipeline.run_directory import RunDirectory, StageDirectory
from pipeline.states import lacks
from pipeline.violations import shown
from stages.settings import RunSettings

LEFT_BEHIND = (
    *("attempt_*", "rollouts", "models", "wandb", "tmp_step_*", "damaged_step_*"),
    *("stage.lock", "engine"),
)


def fork(run: RunDirectory, settings: RunSettings, other: RunDirectory) -> list[str]:
    """Take over every finished stage of `other` whose settings, data and inputs are those of this
    run, and that has left nothing here; returns their names.

    Checkpoints are linked, not copied, where both runs lie on one file system: nobody writes into
    a whole one. Raises OSError when the disk is full or not to be written.
    """
    events = latest(Ledger(other.ledger).events())
    ledger, taken = Ledger(run.ledger), []
    for stage in compile_graph(settings):
        event = events.get(stage.name)
        if event is None or event.state != "done" or run.stage(stage.name).path.exists():
            continue
        if _is_what_would_be_made(stage, settings, run, other.stage(stage.name)):
            _take_over(other.stage(stage.name), run.stage(stage.name))
            said = f": {event.cause}" if stage.kind == "gate" else ""
            ledger.append(stage.name, "done", f"taken over from {shown(other.path)}{said}", 0)
            taken.append(stage.name)
    return taken


def _is_what_would_be_made(
    stage: Stage, settings: RunSettings, run: RunDirectory, theirs: StageDirectory
) -> bool:
    manifest = read_manifest(theirs)
    if manifest is None or lacks(stage, theirs):
        return False
    now = lineage_now(stage, settings, run)
    return None not in now.parents.values() and not any(changes(manifest, now))


def _take_over(theirs: StageDirectory, ours: StageDirectory) -> None:
    """Whole or not at all: under another name until it is complete."""
    newest = theirs.newest_checkpoint()
    keep = newest.path.name if newest else None

    def left_behind(folder: str, names: list[str]) -> set[str]:
        ignored = shutil.ignore_patterns(*LEFT_BEHIND)(folder, names)
        older = [name for name in names if name.startswith("step_") and name != keep]
        return {*ignored, *older}

    unfinished = ours.path.with_name(f".{ours.path.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(theirs.path, unfinished, ignore=left_behind, copy_function=_link_or_copy)
    unfinished.rename(ours.path)


def _link_or_copy(source: str, target: str) -> None:
    if Path(source).parent.name.startswith("step_"):
        try:
            os.link(source, target)
            return
        except OSError:  # another file system, or one without links
            pass
    shutil.copy2(source, target)
