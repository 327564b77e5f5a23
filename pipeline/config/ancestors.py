"""Warnings of merges whose teachers do not descend from what their student descends from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from pipeline.config.unroll import Blocks, Unrolled, is_path
from stages.kinds.distill.settings import domain_of
from stages.kinds.kind import KINDS
from stages.settings import RunSettings


def ancestor_cautions(settings: RunSettings) -> Iterator[tuple[str, str]]:
    """Yield each teacher without a common ancestor with its student, as (dotted key, message).

    The ancestors of a model outside the run are not known.
    """
    blocks = Blocks(settings)
    parents = {stage.name: list(_parents(stage, blocks)) for stage in blocks.stages}
    # By key and teacher: the stages of a block with for_each say it once.
    cautions = {}
    for stage in blocks.stages:
        if blocks.inputs(stage).parent is None or not parents[stage.name]:
            continue
        student = parents[stage.name][0]
        for label, reference in blocks.inputs(stage).teachers.items():
            teacher = blocks.resolve(reference, domain_of(label))
            if teacher is None or is_path(teacher):
                continue
            if _line(teacher, parents).isdisjoint(_line(student, parents)):
                key = f"{stage.key}.{stage.settings.key_of('teachers', label)}"
                cautions[key, teacher] = (
                    f"{teacher} and {student}, which {stage.name} starts from, have no common"
                    " ancestor; a student learns little from a teacher of another start"
                )
    yield from ((key, message) for (key, _), message in cautions.items())


def _parents(stage: Unrolled, blocks: Blocks) -> Iterator[str]:
    """Yield the models that a stage's weights come from, `from` first."""
    inputs = blocks.inputs(stage)
    references = [(inputs.parent, stage.domain)] if inputs.parent else []
    if KINDS[stage.settings.kind].merges:  # other kinds only compare with their models
        references += [(name, stage.domain) for name in inputs.models.values()]
        references += [(name, domain) for domain, name in inputs.references.items()]
    if inputs.parent is None and KINDS[stage.settings.kind].imports:
        yield "model.initial_weights"
    yield from filter(None, (blocks.resolve(name, domain) for name, domain in references))


def _line(name: str, parents: Mapping[str, Iterable[str]]) -> set[str]:
    """Return a model and all that it descends from."""
    ancestors: set[str] = set()
    left = [name]
    while left:
        if (model := left.pop()) not in ancestors:
            ancestors.add(model)
            left += parents.get(model, ())
    return ancestors
