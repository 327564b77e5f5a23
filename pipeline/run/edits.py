"""The effects of a changed configuration on a run that exists, before it is run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from parallel.files import read_text
from pipeline.config.read import Mapping as TreeMapping
from pipeline.config.read import Reader, plain
from pipeline.config.unroll import Blocks, Unrolled
from pipeline.run.graph import Stage
from pipeline.run.lineage import Lineage, changes, lineage_from, read_manifest, renamed
from pipeline.run.run import Run, StageState
from pipeline.text import shown
from stages.settings import AnyStageSettings, RunSettings


@dataclass(frozen=True)
class Edit:
    """The effects of an edit on the stages of a run.

    `stale` has causes, `reruns` the stages that run (again) once the stale ones are rerun,
    `deleted` where the output of each stage stays that the configuration no longer has, and
    `renamed` the values of `was` that keep a deleted stage's output, each with the block.
    """

    reused: tuple[str, ...]
    stale: dict[str, str]
    reruns: tuple[str, ...]
    new: tuple[str, ...]
    deleted: dict[str, str]
    renamed: tuple[tuple[str, str], ...]


def edit_of(run: Run, states: Mapping[str, StageState]) -> Edit | None:
    """Return the effects of the settings of `run` on its directory; None where there are none."""
    if not run.settings_file.exists():
        return None
    names = {stage.name for stage in run.stages}
    deleted = {
        path.name: shown(path)
        for path in sorted((run.path / "stages").glob("[!.]*"))
        if path.name not in {*names, *run.former.values()} and (path / "manifest.json").exists()
    }
    stale = {name: state.cause for name, state in states.items() if state.state == "stale"}
    # Without an absent stage nothing can be new or renamed, and run.yaml need not be read.
    absent = [stage for stage in run.stages if not run.stage(stage.name).path.exists()]
    before = _recorded(run) if absent else None
    former_names = _names_in(before) if before else names
    new = [stage for stage in absent if stage.name not in former_names]
    if not (stale or new or deleted):
        return None
    again = {stage.name for stage in run.downstream(stale)}
    reruns = [name for name in states if name in again or states[name].state != "done"]
    reused = tuple(name for name in states if name not in reruns)
    renamed = tuple(_renamed(run, before, new, deleted)) if before and deleted else ()
    of_new = tuple(stage.name for stage in new)
    return Edit(reused, stale, tuple(reruns), of_new, deleted, renamed)


def edit_lines(run: Run, edit: Edit, rerun: str) -> Iterator[str]:
    """Yield an edit in words; `rerun` has the options that rerun the stale stages."""
    yield f"edit: what this configuration changes in {shown(run.path)}"
    yield f"  reused: {', '.join(edit.reused) or 'no stage'}"
    for title, names in (("new", edit.new), ("stale", tuple(edit.stale))):
        if names:
            yield f"  {title}: {', '.join(names)}"
    if edit.reruns:
        how = f", with {rerun}" if edit.stale else ""
        yield f"  runs{how}: {', '.join(edit.reruns)}"
    yield from hints(run, edit)


def moved_lines(run: Run) -> list[str]:
    """Return the deleted and renamed stages of a run that has started, with what to do."""
    edit = edit_of(run, run.states) if run.settings_file.exists() else None
    return [*hints(run, edit)] if edit else []


def hints(run: Run, edit: Edit) -> Iterator[str]:
    """Yield the deleted stages, and the keys that keep the work of renamed ones."""
    for name, path in edit.deleted.items():
        yield f"  deleted: {name}: its output stays in {path}"
    for was, block in edit.renamed:
        quoted = f"'{was}'" if "{" in was else was  # a brace ends a flow mapping
        yield f"  renamed? keep its work with `was: {quoted}` in stages.{block}"


def edit_json(edit: Edit | None) -> dict[str, Any] | None:
    """Return an edit as `braid plan --json` prints it."""
    return None if edit is None else asdict(edit)


def _recorded(run: Run) -> Blocks | None:
    """Return the blocks of run.yaml, as the run writes it; None where they are invalid by now.

    Only these and the names of the domains are read: the rest takes a second at 1,000 domains.
    """
    text = read_text(run.settings_file)
    tree = Reader().value(_below(text, "stages"), ("stages",))
    if not isinstance(tree, TreeMapping):
        return None
    try:
        # As `validate` reads settings: only strict JSON takes a list for a tuple, and no more.
        stages = TypeAdapter(dict[str, AnyStageSettings]).validate_json(
            json.dumps(plain(tree)), strict=True
        )
    except ValidationError:
        return None
    names = re.findall(r"^  ([^\s:]+):", _below(text, "domains"), re.MULTILINE)
    domains = dict.fromkeys(name.strip("'\"") for name in names)
    fields: dict[str, Any] = {"stages": stages, "domains": domains}
    return Blocks(RunSettings.model_construct(**fields))


def _below(text: str, key: str) -> str:
    """Return the lines below a key of the document, by the indentation alone."""
    _, _, below = f"\n{text}".partition(f"\n{key}:\n")
    return re.split(r"^\S", below, maxsplit=1, flags=re.MULTILINE)[0]


def _names_in(blocks: Blocks) -> set[str]:
    """Return the names of the stages and gates of blocks."""
    return {name for stage in blocks.stages for name in (stage.name, stage.gate) if name}


def _renamed(
    run: Run, before: Blocks, new: list[Stage], deleted: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield the `was` with which a new stage would be a deleted one, and its block; each once."""
    left = [stage for stage in before.stages if stage.name in deleted]
    matched: dict[str, str] = {}  # names of stages of before, by new names
    pairs: dict[tuple[str, str], None] = {}
    for stage in new:  # inputs come first
        outputs = {name: run.stage(matched.get(name, name)).output() for name in stage.inputs}
        now = lineage_from(stage, outputs, run.settings.layout.model_dump())
        names = {old: name for name, old in {**run.former, **matched}.items()}
        for other in left:
            manifest = read_manifest(run.stage(other.name))
            alike = (other.settings.kind, other.domains) == (stage.kind, stage.domains)
            if alike and manifest and _same(renamed(manifest, names, stage.reads), now):
                matched[stage.name] = other.name
                left.remove(other)
                if (pair := _was(run, before, other, stage)) is not None:
                    pairs[pair] = None
                break
    yield from pairs


def _same(recorded: Lineage, now: Lineage) -> bool:
    """Return whether a lineage is the recorded one, but for the name that seeds it."""
    alike = (recorded.parents, recorded.routing) == (now.parents, now.routing)
    return alike and not any(changes(recorded, replace(now, seeded_as=None)))


def _was(run: Run, before: Blocks, old: Unrolled, new: Stage) -> tuple[str, str] | None:
    """Return the `was` that makes a deleted stage's block the new one's, and the new block."""
    if new.block is None:
        return None
    here, there = run.settings.stages, before.run.stages
    block = there[old.block]
    renamed_block = old.block not in here and new.block not in there
    renamed_stages = old.block == new.block and block.as_ and here[new.block].as_
    was = block.was or block.as_ or old.block
    return (was, new.block) if renamed_block or renamed_stages else None
