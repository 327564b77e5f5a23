"""Why a stage stands where it stands, how two runs differ, and a run's stages as a drawing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from pipeline.config.validate import differing_keys
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import Stage
from pipeline.run.lineage import Manifest, read_manifest
from pipeline.run.run import Run
from pipeline.run.states import StageState
from pipeline.slurm.jobs import queue_of
from pipeline.text import clock

DIGEST_LENGTH = 12  # characters of a digest that are shown
COLOURS = {
    "done": "palegreen",
    "running": "lightblue",
    "submitted": "lightcyan",
    "failed": "lightcoral",
    "stale": "khaki",
    "pending": "white",
}


def why(run: Run, name: str) -> Iterator[str]:
    """The state of a stage and its cause, what it was made from, and all that happened to it.

    Raises BraidError for a stage that the run does not have.
    """
    [stage] = run.chosen([name])
    states = run.states_with(queue_of(run)[0])
    yield f"{name} is {_with_cause(states[name])}"
    directory = run.stage(name)
    if checkpoint := directory.newest_checkpoint():
        yield f"  newest checkpoint: step {checkpoint.step}, {checkpoint.digest[:DIGEST_LENGTH]}"
    manifest = read_manifest(directory)
    if manifest is None:
        yield "  it was never begun"
    for parent in stage.inputs:
        used = manifest.parents.get(parent) if manifest else None
        made_from = f"; it was made from {used[:DIGEST_LENGTH]} of it" if used else ""
        yield f"  from {parent}, which is {_with_cause(states[parent])}{made_from}"
    for gate in stage.after:
        yield f"  after {gate}, which is {_with_cause(states[gate])}"
    if manifest:
        yield f"  by the code of {manifest.code}"
        yield f"  with {', '.join(' '.join(each) for each in manifest.versions.items())}"
    for event in run.events:
        if event.stage == name:
            took = f" after {clock(event.seconds)}" if event.seconds is not None else ""
            yield f"  {event.time}  attempt {event.attempt}: {event.state}{took}: {event.cause}"


def why_json(run: Run, stage: Stage, states: Mapping[str, StageState]) -> dict[str, Any]:
    """Return what `why` says of a stage, as `braid why --json` prints it."""
    manifest = read_manifest(run.stage(stage.name))
    newest = run.stage(stage.name).newest_checkpoint()
    used = manifest.parents if manifest else {}
    return {
        "stage": stage.name,
        **asdict(states[stage.name]),
        "checkpoint": {"step": newest.step, "digest": newest.digest} if newest else None,
        "inputs": {
            name: {"state": states[name].state, "digest": used.get(name)} for name in stage.inputs
        },
        "after": {name: states[name].state for name in stage.after},
        "code": manifest.code if manifest else None,
        "versions": manifest.versions if manifest else {},
        "events": [asdict(event) for event in run.events if event.stage == stage.name],
    }


Differences = dict[str, tuple[Any, Any]]  # by what differs: here, there


def difference(run: Run, other: Run) -> dict[str, Any]:
    """Return the differences of two runs: `settings`, and by stage the lineage and the output."""
    settings = differing_keys(run.settings, other.settings)
    settings.pop("name", None)
    names = dict.fromkeys(stage.name for stage in (*run.stages, *other.stages))
    stages = {name: _lineage_difference(run, other, name) for name in names}
    return {"settings": settings, "stages": {name: each for name, each in stages.items() if each}}


def difference_lines(found: dict[str, Any]) -> list[str]:
    """Return the lines of `braid diff`; none where nothing differs."""
    lines = []
    for title, block in {"settings": found["settings"], **found["stages"]}.items():
        if block:
            lines += [title, *(f"  {k}: {_text(a)} | {_text(b)}" for k, (a, b) in block.items())]
    return lines


def dot(run: Run, states: dict[str, StageState]) -> Iterator[str]:
    """The graph in the language of Graphviz: an arrow for every checkpoint that a stage loads, and
    a bold one from every gate to what waits for it."""
    yield f"digraph {json.dumps(run.settings.name)} {{"
    yield "  rankdir=LR; node [shape=box, style=filled];"
    for stage in run.stages:
        label = f"{stage.name}\n{stage.kind}, {states[stage.name].state}"
        look = f"fillcolor={COLOURS[states[stage.name].state]}"
        if stage.kind == "gate":
            look += ", shape=diamond"
        yield f"  {json.dumps(stage.name)} [label={json.dumps(label)}, {look}];"
    for stage in run.stages:
        for name in stage.inputs:
            yield f"  {json.dumps(name)} -> {json.dumps(stage.name)}{_arrow(stage, name)};"
        for name in stage.after:
            yield f"  {json.dumps(name)} -> {json.dumps(stage.name)} [style=bold, label=gate];"
    yield "}"


def _arrow(stage: Stage, name: str) -> str:
    if name == stage.parent:
        return ""
    return (
        " [style=dashed, label=teaches]" if name in stage.teachers.values() else " [style=dotted]"
    )


def _with_cause(state: StageState) -> str:
    return f"{state.state}: {state.cause}" if state.cause else state.state


def _lineage_difference(run: RunDirectory, other: RunDirectory, name: str) -> Differences:
    """Return the differences of a stage other than its settings."""
    ours, theirs = (read_manifest(each.stage(name)) for each in (run, other))
    if ours is None or theirs is None:
        return {"started": (ours is not None, theirs is not None)} if ours is not theirs else {}
    newest = "newest checkpoint", _newest(run, name), _newest(other, name)
    found = [*_pairs(ours, theirs), newest]
    return {what: (here, there) for what, here, there in found if here != there}


def _newest(run: RunDirectory, name: str) -> str | None:
    found = run.stage(name).newest_checkpoint()
    return f"step {found.step}, {found.digest[:DIGEST_LENGTH]}" if found else None


def _pairs(ours: Manifest, theirs: Manifest) -> Iterator[tuple[str, Any, Any]]:
    yield "code", ours.code, theirs.code
    yield "layout", ours.layout, theirs.layout
    for title, here, there in (
        ("version of", ours.versions, theirs.versions),
        ("checkpoint of", _short(ours.parents), _short(theirs.parents)),
        ("files of", _short(ours.files), _short(theirs.files)),
    ):
        for key in dict.fromkeys([*here, *there]):
            yield f"{title} {key}", here.get(key), there.get(key)


def _short(digests: dict[str, str | None]) -> dict[str, str]:
    return {name: digest[:DIGEST_LENGTH] for name, digest in digests.items() if digest}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
