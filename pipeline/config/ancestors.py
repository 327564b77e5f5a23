"""Warnings of merges whose teachers do not descend from what their student descends from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeline.config.unroll import Blocks, is_path
from stages.kinds.distill import domain_of
from stages.settings import RunSettings


def ancestor_cautions(settings: RunSettings) -> Iterator[tuple[str, str]]:
    """Yield each teacher without a common ancestor with its student, as (dotted key, message).

    The ancestors of a model outside the run are not known.
    """
    blocks = Blocks(settings)
    parents: dict[str, str | None] = {}
    for stage in blocks.stages:
        own = blocks.inputs(stage).parent
        parents[stage.name] = blocks.resolve(own, stage.domain) if own else None
        if own is None and stage.settings.kind == "import":
            parents[stage.name] = "model.initial_weights"
    found = {}
    for stage in blocks.stages:
        student = parents[stage.name]
        if student is None:
            continue
        for label, reference in blocks.inputs(stage).teachers.items():
            teacher = blocks.resolve(reference, domain_of(label))
            if teacher is None or is_path(teacher):
                continue
            if _line(teacher, parents).isdisjoint(_line(student, parents)):
                key = f"{stage.key}.{stage.settings.key_of('teachers', label)}"
                found[key, teacher] = (
                    f"{teacher} and {student}, which {stage.name} starts from, have no common"
                    " ancestor; a student learns little from a teacher of another start"
                )
    yield from ((key, message) for (key, _), message in found.items())


def _line(name: str | None, parents: Mapping[str, str | None]) -> set[str]:
    """Return a model and all that it descends from."""
    found: set[str] = set()
    while name is not None and name not in found:
        found.add(name)
        name = parents.get(name)
    return found
