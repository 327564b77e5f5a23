"""Why a stage stands where it stands, how two runs differ, and a run's stages as a drawing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from pipeline.config.validate import differing_keys
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import Stage, compile_graph
from pipeline.run.ledger import Ledger
from pipeline.run.lineage import Manifest, read_manifest
from pipeline.run.selection import chosen
from pipeline.run.states import StageState, derive
from pipeline.slurm.jobs import queue_of
from pipeline.text import clock
from stages.settings import RunSettings

DIGEST_LENGTH = 12  # characters of a digest that are shown
COLOURS = {
    "done": "palegreen",
    "running": "lightblue",
    "submitted": "lightcyan",
    "failed": "lightcoral",
    "stale": "khaki",
    "pending": "white",
}


def why(run: RunDirectory, settings: RunSettings, name: str) -> Iterator[str]:
    """The state of a stage and its cause, what it was made from, and all that happened to it.

    Raises BraidError for a stage that the run does not have.
    """
    stages = compile_graph(settings)
    [stage] = chosen(run, stages, [name])
    states = derive(run, settings, stages, queue_of(run, Ledger(run.ledger).events())[0])
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
    for event in Ledger(run.ledger).events():
        if event.stage == name:
            took = f" after {clock(event.seconds)}" if event.seconds is not None else ""
            yield f"  {event.time}  attempt {event.attempt}: {event.state}{took}: {event.cause}"


def difference(
    one: tuple[RunDirectory, RunSettings], other: tuple[RunDirectory, RunSettings]
) -> Iterator[str]:
    """What differs between two runs: their settings, and of every stage what it was made from."""
    (run, settings), (other_run, other_settings) = one, other
    differing = differing_keys(settings, other_settings)
    differing.pop("name", None)
    yield from _block("settings", ((key, *values) for key, values in differing.items()))
    names = [stage.name for stage in (*compile_graph(settings), *compile_graph(other_settings))]
    for name in dict.fromkeys(names):
        yield from _block(name, _lineage_difference(run, other_run, name))


def dot(settings: RunSettings, states: dict[str, StageState]) -> Iterator[str]:
    """The graph in the language of Graphviz: an arrow for every checkpoint that a stage loads, and
    a bold one from every gate to what waits for it."""
    yield f"digraph {json.dumps(settings.name)} {{"
    yield "  rankdir=LR; node [shape=box, style=filled];"
    stages = compile_graph(settings)
    for stage in stages:
        label = f"{stage.name}\n{stage.kind}, {states[stage.name].state}"
        look = f"fillcolor={COLOURS[states[stage.name].state]}"
        if stage.kind == "gate":
            look += ", shape=diamond"
        yield f"  {json.dumps(stage.name)} [label={json.dumps(label)}, {look}];"
    for stage in stages:
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


def _lineage_difference(
    run: RunDirectory, other: RunDirectory, name: str
) -> Iterator[tuple[str, Any, Any]]:
    """What differs of a stage beside its settings, each as (what, here, there)."""
    ours, theirs = (read_manifest(each.stage(name)) for each in (run, other))
    if ours is None or theirs is None:
        if ours is not theirs:
            yield "begun", ours is not None, theirs is not None
        return
    for what, here, there in _pairs(ours, theirs):
        if here != there:
            yield what, here, there
    here, there = (_newest(each, name) for each in (run, other))
    if here != there:
        yield "newest checkpoint", here, there


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


def _block(title: str, differences: Iterable[tuple[str, Any, Any]]) -> Iterator[str]:
    lines = [f"  {what}: {_text(here)} | {_text(there)}" for what, here, there in differences]
    if lines:
        yield from (title, *lines)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
