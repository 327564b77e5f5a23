"""The differences between two runs: settings, and stage by stage lineage and output."""

from __future__ import annotations

import json
from typing import Any

from pipeline.config.validate import differing_keys
from pipeline.run.directory import RunDirectory
from pipeline.run.lineage import DIGEST_LENGTH, lineage_changes, read_manifest
from pipeline.run.run import Run

TITLES = {"versions": "version of", "parents": "checkpoint of", "files": "files of"}  # of fields
Differences = dict[str, tuple[Any, Any]]  # by name: here, there


def difference(run: Run, other: Run) -> dict[str, Any]:
    """Return the differences of two runs: `settings`, and by stage the lineage and the output."""
    settings = differing_keys(run.settings, other.settings)
    settings.pop("name", None)
    names = dict.fromkeys(stage.name for stage in (*run.stages, *other.stages))
    stages = {name: _lineage_difference(run, other, name) for name in names}
    return {
        "settings": settings,
        "stages": {name: differences for name, differences in stages.items() if differences},
    }


def difference_lines(difference: dict[str, Any]) -> list[str]:
    """Return the lines of `braid diff`; none where nothing differs."""
    lines = []
    for title, block in {"settings": difference["settings"], **difference["stages"]}.items():
        if block:
            lines += [title, *(f"  {k}: {_text(a)} | {_text(b)}" for k, (a, b) in block.items())]
    return lines


def _lineage_difference(run: RunDirectory, other: RunDirectory, name: str) -> Differences:
    """Return the differences of a stage other than its settings."""
    ours, theirs = (read_manifest(directory.stage(name)) for directory in (run, other))
    if ours is None or theirs is None:
        return {"started": (ours is not None, theirs is not None)} if ours is not theirs else {}
    pairs: Differences = {"code": (ours.code, theirs.code), "layout": (ours.layout, theirs.layout)}
    for change in lineage_changes(ours, theirs, TITLES):
        values = change.before, change.after
        if change.field != "versions":
            values = _short(change.before), _short(change.after)
        pairs[f"{TITLES[change.field]} {change.key}"] = values
    pairs["newest checkpoint"] = _newest(run, name), _newest(other, name)
    return {what: (here, there) for what, (here, there) in pairs.items() if here != there}


def _newest(run: RunDirectory, name: str) -> str | None:
    checkpoint = run.stage(name).newest_checkpoint()
    return f"step {checkpoint.step}, {_short(checkpoint.digest)}" if checkpoint else None


def _short(digest: str | None) -> str | None:
    return digest[:DIGEST_LENGTH] if digest else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
