"""The move of renamed stages' work from their former names to the ones they have now."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from parallel.errors import UserError
from parallel.files import read_text, write_atomically
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import Stage
from pipeline.run.ledger import RENAMED, Ledger, latest, minutes
from pipeline.run.lineage import read_manifest, renamed, save_manifest, stage_paths
from pipeline.run.run import Run
from pipeline.text import shown
from stages.directory import StageDirectory


def move_renamed(run: Run) -> None:
    """Move the work of renamed stages to their names; the caller holds the run's lock.

    Raises:
        UserError: a directory has a new name already, or a stage is running.
    """
    if run.former:
        move_stages(RunDirectory(run.path), run.stages, run.former)
        run.refresh()


def move_stages(run: RunDirectory, stages: Iterable[Stage], former: Mapping[str, str]) -> None:
    """Move the work of the stages that have `former` names.

    Each step is atomic or repeats harmlessly, so the next start finishes what a kill cut short.

    Raises:
        UserError: a directory has a new name already, or a stage is running.
    """
    names = {old: new for new, old in former.items()}
    for old, new in names.items():
        if (path := run.stage(new).path).exists():
            raise UserError(
                f"{shown(path)}: exists without a manifest.json, and the work of {new} is in "
                f"{shown(run.stage(old).path)}; move one of them away"
            )
    for name in stage_paths(run):
        if run.is_running(name):  # under a shared lock, as of `braid submit`
            where = f"stage {name} of {shown(run.path)}"
            raise UserError(f"{where}: running; rename stages when it has ended")
    for stage in stages:
        directory = run.stage(former.get(stage.name, stage.name))
        if (manifest := read_manifest(directory)) is not None:
            now = renamed(manifest, names, stage.reads)
            if now != manifest:
                save_manifest(directory, now)
        if stage.measures:
            _rename_models(directory, names)
    for old, new in names.items():
        _record(run.ledger, old, new)
    # Directories move last: until then `former_names` finds what is left to do.
    for old, new in names.items():
        run.stage(old).path.rename(run.stage(new).path)


def _rename_models(directory: StageDirectory, names: Mapping[str, str]) -> None:
    """Rename the models that an evaluation or a gate has measured."""
    for old, new in names.items():
        for parent in (directory.measured, directory.solved):
            if (path := parent / f"{old}.json").exists():
                path.rename(parent / f"{new}.json")
        if (samples := directory.samples / old).exists():
            samples.rename(directory.samples / new)

    def keyed(results: dict[str, Any]) -> dict[str, Any]:
        models = {names.get(name, name): scores for name, scores in results["models"].items()}
        return {**results, "models": models}

    def labelled(line: dict[str, Any]) -> dict[str, Any]:
        label = {"model": names.get(line["model"], line["model"])} if "model" in line else {}
        return {**line, **label}

    _rewrite(directory.results, lambda text: json.dumps(keyed(json.loads(text)), indent=2) + "\n")
    _rewrite(
        directory.metrics,
        lambda text: "".join(
            json.dumps(labelled(json.loads(line))) + "\n" for line in text.splitlines()
        ),
    )


def _rewrite(path: Path, change: Callable[[str], str]) -> None:
    """Replace a file's text; leave a damaged file to its reader, which reports it."""
    try:
        text = read_text(path)
        changed = change(text)
    except (FileNotFoundError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return
    if changed != text:
        write_atomically(path, changed)


def _record(ledger: Ledger, old: str, new: str) -> None:
    """Record the new name with the state, attempt and time of the old one."""
    events = ledger.events()
    newest, mark = latest(events), f"renamed from {old}"
    event = newest.get(old)
    if event is None or event.cause.startswith(RENAMED):
        return
    if new not in newest or not newest[new].cause.endswith(mark):
        # The cause stays in front: how a verdict begins says what a gate has decided.
        cause = f"{event.cause}; {mark}" if event.cause else mark
        spent = minutes(events).get(old)
        seconds = None if spent is None else 60 * spent
        ledger.append(new, event.state, cause, event.attempt, seconds, event.job)
    ledger.append(old, "pending", f"{RENAMED}{new}", event.attempt)
