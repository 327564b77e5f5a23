"""The renaming of a block of a run: its finished and its half-finished work stay valid.

Everything that is left to do is written to the run before the first change. Each step does nothing
where it was done before, so the same command finishes what a kill cut short.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from parallel.errors import UserError, hint
from parallel.files import read_text, write_atomically
from pipeline.config.unroll import Blocks, graph_rules, is_path
from pipeline.config.yaml_core import dump
from pipeline.run.directory import RunDirectory
from pipeline.run.graph import Stage, compile_graph, digest
from pipeline.run.ledger import RENAMED, latest, minutes
from pipeline.run.lineage import MANIFEST
from pipeline.run.run import Run
from pipeline.text import reason, shown
from stages.directory import StageDirectory
from stages.kinds.grpo.settings import OWN_REFERENCES
from stages.settings import RunSettings

KL_REFERENCE = "objective.kl.reference"
Tree = dict[str, Any]


@dataclass(frozen=True)
class Renaming:
    """A renaming, with all that its steps need.

    `stages` has the new names of stages by their old ones, `settings` the run.yaml afterwards,
    `edits` the keys of it that differ, and `reads` each stage's recorded settings that change, by
    its old name: key -> (before, after).
    """

    old: str
    new: str
    stages: dict[str, str]
    settings: Tree
    edits: Tree
    reads: dict[str, dict[str, tuple[Any, Any]]]

    def finish(self, run: RunDirectory) -> None:
        """Do every step that is not done yet; the caller holds the run's lock."""
        if not run.renaming.exists():
            write_atomically(run.renaming, json.dumps(asdict(self)) + "\n")
        for step in self._steps(run):
            step()
        run.renaming.unlink()

    def _steps(self, run: RunDirectory) -> Iterator[Callable[[], object]]:
        """Yield the steps, in order; each is atomic, or repeats harmlessly.

        Directories move before run.yaml changes: until then the old settings find nothing that a
        stage could start from by mistake, and a lock of the run is refused.
        """
        known = {new: old for old, new in self.stages.items()}
        for path in sorted((run.path / "stages").glob("[!.]*")):
            directory = StageDirectory(path)
            yield partial(self._rewrite_manifest, directory, known.get(path.name, path.name))
            if directory.measured.exists():
                yield from self._measurements(directory)
        for old, new in self.stages.items():
            yield partial(_move, run.stage(old).path, run.stage(new).path)
        yield partial(write_atomically, run.settings_file, dump(self.settings))
        yield partial(self._rewrite_names, run.results, "models", "minutes")
        for old, new in self.stages.items():
            yield partial(self._record, run, old, new)

    def _rewrite_manifest(self, directory: StageDirectory, name: str) -> None:
        """Rename the stage and its inputs in its manifest; leave a damaged one as it is."""
        try:
            found = json.loads(read_text(directory.manifest))
            MANIFEST.validate_python(found)
        except (FileNotFoundError, ValidationError, ValueError, RecursionError):
            return
        found["stage"] = self.stages.get(found["stage"], found["stage"])
        found["parents"] = self._keyed(found["parents"])
        for key, (before, after) in self.reads.get(name, {}).items():
            if found["settings"].get(key) == before:  # else the stage is stale, and stays so
                found["settings"][key] = after
        found["config"] = digest(found["settings"])
        write_atomically(directory.manifest, json.dumps(found, indent=2) + "\n")

    def _measurements(self, directory: StageDirectory) -> Iterator[Callable[[], object]]:
        """Yield the steps that rename the models which a stage has measured."""
        for old, new in self.stages.items():
            for of in (directory.measured, directory.solved):
                yield partial(_move, of / f"{old}.json", of / f"{new}.json")
            yield partial(_move, directory.samples / old, directory.samples / new)
        yield partial(self._rewrite_names, directory.results, "models")
        yield partial(self._rewrite_metrics, directory.metrics)

    def _rewrite_names(self, path: Path, *blocks: str) -> None:
        """Rename the keys of `blocks` in a file of JSON; leave a damaged one as it is."""
        try:
            found = json.loads(read_text(path))
            found |= {name: self._keyed(found[name]) for name in blocks if name in found}
        except (FileNotFoundError, ValueError, RecursionError, TypeError, AttributeError):
            return
        write_atomically(path, json.dumps(found, indent=2) + "\n")

    def _rewrite_metrics(self, path: Path) -> None:
        """Rename the models in the metrics of an evaluation."""
        try:
            lines = [json.loads(line) for line in read_text(path).splitlines()]
            for line in lines:
                if "model" in line:
                    line["model"] = self.stages.get(line["model"], line["model"])
        except (FileNotFoundError, ValueError, RecursionError, TypeError):
            return
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines))

    def _record(self, run: RunDirectory, old: str, new: str) -> None:
        """Record the new name with the state, attempt and time of the old one."""
        events = run.ledger.events()
        newest, mark = latest(events), f"renamed from {old}"
        event = newest.get(old)
        if event is None or event.cause.startswith(RENAMED):
            return
        if new not in newest or not newest[new].cause.endswith(mark):
            # The cause stays in front: how a verdict begins says what a gate has decided.
            cause = f"{event.cause}; {mark}" if event.cause else mark
            spent = minutes(events).get(old)
            seconds = None if spent is None else 60 * spent
            run.ledger.append(new, event.state, cause, event.attempt, seconds, event.job)
        run.ledger.append(old, "pending", f"{RENAMED}{new}", event.attempt)

    def _keyed(self, found: Mapping[str, Any]) -> dict[str, Any]:
        return {self.stages.get(name, name): value for name, value in found.items()}


def unfinished_renaming(run: RunDirectory) -> Renaming | None:
    """Return the renaming that a kill cut short; None without one.

    Raises:
        UserError: its file is damaged.
    """
    try:
        found = json.loads(read_text(run.renaming))
        return TypeAdapter(Renaming).validate_python(found)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        why = reason(error) if isinstance(error, OSError) else "not a renaming"
        raise UserError(
            f"{shown(run.renaming)}: damaged: {why}; a kill cannot leave that: restore the file"
        ) from error


def renaming(run: Run, old: str, new: str) -> Renaming:
    """Return the renaming of a block, or of the `as` of one.

    Raises:
        UserError: there is no such block, the new name is taken or none, or a reference would
            change its meaning.
    """
    block = _block_named(run.settings, old)
    before = run.settings.model_dump(mode="json")
    after = _renamed(run.settings, block, old, new)
    _check_new_name(run, old, new)
    settings = RunSettings.model_validate_json(json.dumps(after), strict=True)
    for _, message in graph_rules(settings):
        raise UserError(f"{new}: {message}")
    pairs = list(zip(Blocks(run.settings).stages, Blocks(settings).stages, strict=True))
    names = {a.name: b.name for a, b in pairs}
    names |= {a.gate: b.gate for a, b in pairs if a.gate and b.gate}
    renamed = {stage.name: stage for stage in compile_graph(settings)}
    reads = {}
    for stage in run.stages:
        now = renamed[names[stage.name]]
        _check_same(stage, now, names, old)
        if changed := _changed(stage.reads, now.reads):
            reads[stage.name] = changed
    stages = {name: now for name, now in names.items() if name != now}
    for name in stages.values():
        if (path := run.stage(name).path).exists():
            raise UserError(
                f"{shown(path)} exists, though the run has no stage {name}; move it away, or "
                "choose another name"
            )
    return Renaming(old, new, stages, after, _edits(before, after, block, new), reads)


def _block_named(settings: RunSettings, name: str) -> str:
    """Return the block that a name means: its own, or its `as`."""
    if name in settings.stages:
        return name
    for block, each in settings.stages.items():
        if each.as_ == name:
            return block
    stages = Blocks(settings).stages
    for stage in stages:
        if name == stage.gate:
            raise UserError(f"{name} is the gate of {stage.name}, and named after it; rename that")
        if name == stage.name:
            of = stage.settings.as_ or stage.block
            raise UserError(f"{name} is a stage of {of}; rename all of its stages: {of}")
    known = [*settings.stages, *(each.as_ for each in settings.stages.values() if each.as_)]
    raise UserError(f"no block {name}; {hint(name, known)}")


def _check_new_name(run: Run, old: str, new: str) -> None:
    """Raise UserError where the new name means something in the run already."""
    taken = {*run.settings.stages, *(stage.name for stage in run.stages)}
    taken |= {each.as_ for each in run.settings.stages.values() if each.as_}
    if new == old:
        raise UserError(f"{old} is its name already")
    if new in OWN_REFERENCES:
        raise UserError(f"{new} is not the name of a stage in {KL_REFERENCE}; choose another name")
    if new in taken:
        raise UserError(f"{shown(run.path)} has {new} already; choose another name")


def _template(block: str, settings: Any) -> str:
    return str(settings.as_ or (f"{block}.{{domain}}" if settings.for_each else block))


def _renamed(settings: RunSettings, block: str, old: str, new: str) -> Tree:
    """Return the settings with a block, or its `as`, renamed and all that refers to it."""
    tree: Tree = settings.model_dump(mode="json")
    own, is_block = settings.stages[block], block == old
    before = _template(block, own)
    after = new if not is_block else own.as_ or _template(new, own)
    named = {
        _of_domain(before, domain): _of_domain(after, domain)
        for domain in (settings.domains if own.for_each else [""])
    }
    named |= {before: after, block: new if is_block else block}

    def now(reference: Any, where: str) -> Any:
        if isinstance(reference, list):
            return [now(each, where) for each in reference]
        if isinstance(reference, dict):  # the weights of a domain's teachers
            return {now(each, where): weight for each, weight in reference.items()}
        if not isinstance(reference, str) or is_path(reference):
            return reference
        if where.endswith(KL_REFERENCE) and reference in OWN_REFERENCES:
            return reference
        return named.get(reference, reference)

    for where in _reference_keys(settings):
        *above, last = where.split(".")
        holder: Any = tree
        for part in above:
            holder = holder.get(part) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and last in holder:
            holder[last] = now(holder[last], where)
    stated = tree["stages"][block]
    if before != after:
        seeded = own.seeded_as or before
        stated["seeded_as"] = None if seeded == after else seeded
    if not is_block:
        stated["as"] = new
    else:
        tree["stages"] = {
            new if name == block else name: each for name, each in tree["stages"].items()
        }
    return tree


def _of_domain(template: str, domain: str) -> str:
    return template.replace("{domain}", domain) if domain else template


def _reference_keys(settings: RunSettings) -> list[str]:
    """Return every dotted key that may refer to a stage."""
    blocks = Blocks(settings)
    keys = [key for stage in blocks.stages for key, *_ in blocks.references(stage)]
    keys += [f"stages.{name}.{KL_REFERENCE}" for name in settings.stages]
    keys += [f"domains.{name}.{KL_REFERENCE}" for name in settings.domains]
    return list(dict.fromkeys(keys))


def _check_same(stage: Stage, now: Stage, names: Mapping[str, str], old: str) -> None:
    """Raise UserError where a stage would load, wait for or draw something else than before."""

    def shape(of: Stage, named: Mapping[str, str]) -> tuple[Any, ...]:
        loaded = [named.get(each, each) for each in (of.parent or "", *of.teachers.values())]
        others = [named.get(each, each) for each in (*of.models.values(), *of.data.values())]
        waits = sorted(named.get(each, each) for each in of.after)
        return of.kind, of.domains, loaded, others, waits, of.steps, of.seeded_as

    if shape(stage, names) != shape(now, {}):
        raise UserError(
            f"with {old} renamed, {now.name} would start from something else; another block has a "
            "name that its references could mean: choose another name"
        )


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {
        key: (value, after[key])
        for key, value in before.items()
        if key in after and after[key] != value
    }


def _edits(before: Tree, after: Tree, block: str, new: str) -> Tree:
    """Return the keys that differ, nested as in a configuration; a renamed block under its name."""
    moved = block not in after["stages"]
    stages = {
        new if moved and name == block else name: each for name, each in before["stages"].items()
    }
    return _nested({**before, "stages": stages}, after)


def _nested(before: Tree, after: Tree) -> Tree:
    found: Tree = {}
    for key, value in after.items():
        was = before.get(key)
        if isinstance(value, dict) and isinstance(was, dict):
            if inner := _nested(was, value):
                found[key] = inner
        elif value != was:
            found[key] = value
    return found


def _move(old: Path, new: Path) -> None:
    if old.exists() and not new.exists():
        old.rename(new)
