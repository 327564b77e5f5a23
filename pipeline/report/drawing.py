"""The graph of a run as a drawing: for Graphviz, for Mermaid, and as a tree in a table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.config.unroll import is_path
from pipeline.run.graph import Stage
from pipeline.run.run import Run, StageState

COLOURS = {
    "done": "palegreen",
    "running": "lightblue",
    "submitted": "lightcyan",
    "failed": "lightcoral",
    "stale": "khaki",
    "pending": "white",
}
MOST_NAMED = 3  # names of one role in a cell of a table; the others are counted
DEEPEST = 12  # levels of the tree that are indented
Role = Literal["parent", "teacher", "data", "model", "after"]
DOT = {
    "parent": "",
    "teacher": " [style=dashed, label=teaches]",
    "data": " [style=dashed, label=data]",
    "model": " [style=dotted]",
    "after": " [style=bold, label=gate]",
}
MERMAID = {
    "parent": "-->",
    "teacher": "-. teaches .->",
    "data": "-. data .->",
    "model": "-.->",
    "after": "== gate ==>",
}


@dataclass(frozen=True)
class Edge:
    """An arrow of the graph, from a stage or the path of a model to a stage."""

    source: str
    target: str
    role: Role


def edges(stages: Sequence[Stage]) -> Iterator[Edge]:
    """Yield every arrow, one for each pair of stages: as a parent rather than as a model."""
    for stage in stages:
        roles: dict[str, Role] = {stage.parent: "parent"} if stage.parent else {}
        inputs: tuple[tuple[Role, Mapping[str, str]], ...] = (
            ("teacher", stage.teachers),
            ("data", stage.data),
            ("model", stage.models),
        )
        for role, sources in inputs:
            for name in sources.values():
                roles.setdefault(name, role)
        for name in stage.after:
            roles.setdefault(name, "after")
        yield from (Edge(name, stage.name, role) for name, role in roles.items())


def outside(stages: Sequence[Stage]) -> list[str]:
    """Return the paths of all models from outside the run."""
    return list(
        dict.fromkeys(source for stage in stages for source in stage.sources if is_path(source))
    )


def dot(run: Run, states: Mapping[str, StageState]) -> Iterator[str]:
    """Yield the graph in Graphviz's language.

    An arrow is a checkpoint that a stage loads; a bold one leads from a gate to what waits for it.
    """
    yield f"digraph {_dotted(run.settings.name)} {{"
    yield "  rankdir=LR; node [shape=box, style=filled];"
    for path in outside(run.stages):
        yield f"  {_dotted(path)} [shape=cylinder, fillcolor=white];"
    for stage in run.stages:
        label = f"{stage.name}\n{stage.kind}, {states[stage.name].state}"
        look = f"fillcolor={COLOURS[states[stage.name].state]}"
        if stage.declared.judges:
            look += ", shape=diamond"
        yield f"  {_dotted(stage.name)} [label={_dotted(label)}, {look}];"
    for edge in edges(run.stages):
        yield f"  {_dotted(edge.source)} -> {_dotted(edge.target)}{DOT[edge.role]};"
    yield "}"


def _dotted(text: str) -> str:
    """Return a string of Graphviz, which reads UTF-8 and no escapes of JSON."""
    return json.dumps(text, ensure_ascii=False)


def mermaid(run: Run, states: Mapping[str, StageState]) -> Iterator[str]:
    """Yield the graph in Mermaid's language, which GitHub and the site's pages draw.

    Nodes have numbers: names may hold what Mermaid reads as its own.
    """
    yield "flowchart LR"
    numbers: dict[str, str] = {}
    for name in (*outside(run.stages), *(stage.name for stage in run.stages)):
        numbers[name] = f"n{len(numbers)}"
    for path in outside(run.stages):
        yield f'  {numbers[path]}[/"{_quoted(path)}"/]'
    for stage in run.stages:
        state = states[stage.name].state
        label = f'"{_quoted(stage.name)}<br>{stage.kind}, {state}"'
        shape = f"{{{label}}}" if stage.declared.judges else f"[{label}]"
        yield f"  {numbers[stage.name]}{shape}:::{state}"
    for edge in edges(run.stages):
        yield f"  {numbers[edge.source]} {MERMAID[edge.role]} {numbers[edge.target]}"
    for name, colour in COLOURS.items():
        yield f"  classDef {name} fill:{colour},color:black,stroke:black"


def _quoted(text: str) -> str:
    """Return a text in which nothing is an entity, a tag or Markdown (`) of Mermaid."""
    return "".join(
        f"#{ord(character)};" if character in '#&"<>`' else character for character in text
    )


def tree(stages: Sequence[Stage]) -> dict[str, str]:
    """Return every stage's name with the branch of the tree that it stands at.

    A stage stands below what it starts from: its parent, a gate below what it measures, and what
    has neither below the latest of what it loads.
    """
    above = {stage.name: _above(stage) for stage in stages}
    below: dict[str | None, list[str]] = {}
    for name, of in above.items():
        below.setdefault(of, []).append(name)
    branches: dict[str, str] = {}
    # The last one pushed is drawn next, so both the roots and the children are pushed in reverse.
    stack = [(name, "", "") for name in reversed(below.get(None, []))]
    while stack:
        name, prefix, branch = stack.pop()
        branches[name] = f"{prefix}{branch}{name}"
        inner = prefix + {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
        inner = inner if len(inner) < 3 * DEEPEST else inner[: 3 * DEEPEST]
        children = below.get(name, [])
        for number, child in enumerate(reversed(children)):
            stack.append((child, inner, "└─ " if number == 0 else "├─ "))
    return branches


def _above(stage: Stage) -> str | None:
    """Return the stage that another one stands below in the tree; None at its root."""
    if stage.parent and not is_path(stage.parent):
        return stage.parent
    if stage.gated:
        return stage.gated
    merged = stage.models.values() if stage.declared.merges else ()
    loaded = (*stage.data.values(), *stage.teachers.values(), *merged)
    return next((name for name in loaded if not is_path(name)), None)


def origin(stage: Stage) -> str:
    """Return in words what a stage starts from, is taught by and reads."""
    if stage.gated:
        return f"{stage.gated} against {_named(stage.against.values())}"
    phrases = []
    if stage.declared.merges:
        start = f"{stage.parent} and " if stage.parent else ""
        return f"{start}the weights of {_named(stage.models.values())}"
    if stage.parent:
        phrases.append(stage.parent)
    elif stage.models:
        count = len(set(stage.models.values()))
        paths = [path for path in stage.models.values() if is_path(path)]
        phrases.append(f"{count} models{f' ({_named(paths)})' if paths else ''}")
    else:
        phrases.append("model.initial_weights" if stage.declared.imports else "the model settings")
    itself = ["itself"] if "self_teacher.context" in stage.reads else []
    if taught := [*stage.teachers.values(), *itself]:
        phrases.append(f"taught by {_named(taught)}")
    if stage.data:
        phrases.append(f"on {_named(stage.data.values())}")
    if stage.parent and stage.models:
        phrases.append(f"compared with {_named(stage.models.values())}")
    return ", ".join(phrases)


def _named(names: Iterable[str]) -> str:
    """Return up to MOST_NAMED names, and the number of the others."""
    distinct = list(dict.fromkeys(names))
    more = len(distinct) - MOST_NAMED
    text = ", ".join(distinct[:MOST_NAMED])
    return f"{text} and {more} more" if more > 0 else text
