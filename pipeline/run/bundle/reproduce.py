"""A bundle that is run again: its files are unpacked and checked, and its outputs compared."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from parallel.errors import UserError
from parallel.files import read_text
from pipeline.config.unroll import is_path
from pipeline.run.archive import unpacked
from pipeline.run.bundle.inputs import BundleInput, Tree, input_digest
from pipeline.run.bundle.unfinished import ARCHIVES, CONFIG, INDEX
from pipeline.run.bundle.writer import FORMAT, finished_output, processor
from pipeline.run.lineage import Manifest, completed, lineage_changes, read_manifest
from pipeline.run.run import Run
from pipeline.text import shown
from stages.keys import differing
from stages.settings import RunSettings

# Of a lineage's fields, in the order in which a person looks for a cause.
TITLES = {
    **{"parents": "input", "roles": "input as", "files": "files of", "settings": "setting"},
    **{"layout": "layout", "versions": "version of"},
}
PLACES = ("path", "tokenizer", "initial_weights", "reference", "stage")  # keys of paths


@dataclass(frozen=True)
class BundledStage:
    """A stage of a bundled run: its lineage, and the digest of its output."""

    name: str
    kind: str
    state: str
    output: str | None
    lineage: Annotated[Manifest, AfterValidator(completed)] | None


@dataclass(frozen=True)
class _Index:
    """bundle.json, as far as it is read again."""

    __pydantic_config__ = ConfigDict(extra="ignore")

    format: Annotated[int, Field(ge=1)]
    run: str
    deterministic: bool
    processor: str
    inputs: list[BundleInput]
    stages: list[BundledStage]


@dataclass(frozen=True)
class Bundle:
    """A bundle in a directory."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / CONFIG

    @cached_property
    def index(self) -> _Index:
        """The content of bundle.json.

        Raises:
            UserError: it is damaged, or of a later version.
        """
        file = self.path / INDEX
        try:
            index = json.loads(read_text(file))
            if isinstance(index, dict) and index.get("format", FORMAT) != FORMAT:
                raise UserError(
                    f"{shown(file)}: format {index['format']}, and this version reads {FORMAT}; "
                    "run it with the version that wrote it"
                )
            return TypeAdapter(_Index).validate_python(index)
        except (ValidationError, ValueError, RecursionError) as error:
            raise UserError(f"{shown(file)}: damaged; bundle the run again") from error

    def check_inputs(self, settings: RunSettings) -> None:
        """Raise UserError with every input of the settings that is missing or differs.

        The settings are the bundle's, with the overrides of the command line: an input may be
        elsewhere, with the bundled content.
        """
        tree = settings.model_dump(mode="json")
        wrong = [line for bundled in self.index.inputs if (line := self._wrong(bundled, tree))]
        if wrong:
            here = shown(self.path)
            lines = [
                f"{here}: the bundle's inputs are not the ones of its run:",
                *(f"  {line}" for line in wrong),
                "to run it all the same and see which stages differ: "
                f"braid run {shown(self.config)}, then braid bundle --check RUN {here}",
            ]
            raise UserError("\n".join(lines))

    def _wrong(self, bundled: BundleInput, tree: Tree) -> str | None:
        """Return what is wrong with an input; None where its content is the bundled one."""
        stated = _value_at(tree, bundled.key)
        named_with = f"with {bundled.key}=PATH"
        if isinstance(stated, dict):
            stated, named_with = self._teacher(bundled, stated), f"in {bundled.key}"
        gone = stated is None and bundled.function is None
        if gone or (bundled.kind == "model" and not is_path(stated)):
            return None  # an override has removed what reads it, or named a stage instead
        path = Path(os.path.normpath(Path(stated).absolute())) if stated else None
        name = f"{bundled.key}: {shown(path) if path else bundled.function}"
        here = bundled.copied and str(path) == os.path.normpath(
            (self.path / bundled.path).absolute()
        )
        # A bundle is a stranger's: a link in it must not make a run read this machine's files.
        if path and here and not path.resolve().is_relative_to(self.path.resolve()):
            return f"{name}: outside the bundle; bundle the run again"
        digest = input_digest(bundled, path)
        if digest == bundled.digest:
            return None
        reader = (
            f"; {bundled.readers[0]} is the first stage that reads it" if bundled.readers else ""
        )
        if digest is None:
            return f"{name}: missing; restore it, or name its copy {named_with}{reader}"
        return f"{name}: its content differs; restore it{reader}"

    def _teacher(self, bundled_model: BundleInput, weights: dict[str, Any]) -> str | None:
        """Return the path of a domain's weighted teacher; None where only stages teach it.

        That is the bundled path, or one that an override names with the same content.
        """
        bundled = os.path.normpath((self.path / bundled_model.path).absolute())
        paths = [path for path in weights if is_path(path)]
        at = (path for path in paths if os.path.normpath(Path(path).absolute()) == bundled)
        same = (
            path
            for path in paths
            if input_digest(bundled_model, Path(path)) == bundled_model.digest
        )
        return next(chain(at, same, paths), None)


def _value_at(value: Any, key: str) -> Any:
    """Return the value at a dotted key, which numbers the elements of lists; None without one.

    A free name, as of a merged model, may have dots itself.
    """
    numbered = enumerate(value) if isinstance(value, list) else ()
    for name, below in value.items() if isinstance(value, dict) else numbered:
        if key == str(name):
            return below
        inside = key.startswith(f"{name}.")
        if inside and (match := _value_at(below, key.removeprefix(f"{name}."))) is not None:
            return match
    return None


def bundle_at(path: Path) -> Bundle | None:
    """Return the bundle in a directory or an archive, which is unpacked beside it; else None.

    Raises:
        UserError: an archive that no `braid bundle` has written, or that is damaged.
    """
    if (path / INDEX).is_file():
        return Bundle(path)
    if path.name.endswith(ARCHIVES) and path.is_file():
        return Bundle(unpacked(path))
    if path.is_dir():
        raise UserError(f"{shown(path)}: neither a configuration nor a bundle: no {INDEX} in it")
    return None


def foreseen(bundle: Bundle, run: Run) -> list[str]:
    """Return a text on the settings of the first stage that make its outputs differ; or none."""
    bundled = {stage.name: stage.lineage for stage in bundle.index.stages}
    for stage in run.stages:
        if (theirs := bundled.get(stage.name)) is None:
            continue
        if values := differing(*_settings(theirs.settings, stage.reads)):
            title = f"{stage.name} is the first stage that reads other settings than the bundle's:"
            lines = [f"  {_line('', key, *pair)}" for key, pair in values.items()]
            return ["\n".join([title, *lines])]
    return []


def compare(bundle: Bundle, run: Run, only: Collection[str] = ()) -> list[str]:
    """Return the comparison of a run's outputs with a bundle's, in words.

    With `only`, of these stages.

    Raises:
        UserError: an output differs, or is missing; the message names the first such stage, what
            differs in its lineage, and what follows from it.
    """
    index, where = bundle.index, shown(run.path)
    if not index.deterministic:
        why = "its run is not deterministic: true, so equal digests cannot be expected"
        return [f"{shown(bundle.path)}: not compared: {why}"]
    bundled = {stage.name: stage for stage in index.stages if stage.output is not None}
    names = {stage.name for stage in run.stages}
    if absent := [name for name in bundled if name not in names]:
        raise UserError(f"{where} has no stage {absent[0]}, which the bundle has")
    compared = [s for s in run.stages if s.name in bundled and (not only or s.name in only)]
    if not compared:
        return [f"{shown(bundle.path)}: not compared: it has no finished stage of these"]
    ours = {stage.name: finished_output(run, stage) for stage in compared}
    wrong = [name for name, output in ours.items() if output not in (None, bundled[name].output)]
    missing = [name for name, output in ours.items() if output is None]
    if wrong:
        raise UserError("\n  ".join(_report(bundle, run, bundled, [*ours], wrong, missing)))
    if missing:
        raise UserError(
            f"{where}: {missing[0]} is the first stage that has no finished output yet; "
            f"{len(ours) - len(missing)} of {len(ours)} stages are equal"
        )
    selected = [stage.name for stage in run.stages if not only or stage.name in only]
    if left := [name for name in selected if name not in ours]:
        return [
            f"{where}: the output of {len(ours)} of {len(selected)} stages equals the bundle's; not"
            f" compared, since the bundle has no finished output of them: {', '.join(left)}"
        ]
    return [f"{where}: the output of all {len(ours)} stages equals the bundle's"]


def _report(
    bundle: Bundle,
    run: Run,
    bundled: Mapping[str, BundledStage],
    compared: list[str],
    wrong: list[str],
    missing: list[str],
) -> Iterator[str]:
    """Yield the first stage that differs with the causes, its consequences, and the others."""
    first = wrong[0]
    before = compared.index(first)
    yield (
        f"{shown(run.path)}: {first} is the first stage that differs from the bundle's; "
        f"{before - len({*missing} & {*compared[:before]})} of {len(compared)} before it are equal"
    )
    below = {stage.name for stage in run.downstream([first])}
    alone = [first, *(name for name in wrong if name not in below)]
    for name in alone:
        if name != first:
            yield f"{name} differs too, and does not depend on it"
        causes = _differences(bundle, bundled[name].lineage, read_manifest(run.stage(name)))
        indent = "" if name == first else "  "
        none = "nothing recorded differs: the same inputs, settings, code, versions and processor"
        yield from (f"{indent}{cause}" for cause in [*causes] or [none])
    consequences = [name for name in wrong if name not in alone]
    equal = [name for name in compared if name not in wrong and name not in missing]
    for title, names in (
        ("differ as a consequence", consequences),
        ("no finished output yet", missing),
        ("equal", equal),
    ):
        if names:
            yield f"{title}: {', '.join(names)}"


def _differences(bundle: Bundle, theirs: Manifest | None, ours: Manifest | None) -> Iterator[str]:
    """Yield what differs between two lineages of a stage."""
    if theirs is None or ours is None:
        yield "its manifest.json is missing"
        return
    there, here = _portable(theirs), _portable(ours)
    there_settings, here_settings = _settings(there.settings, here.settings)
    there, here = replace(there, settings=there_settings), replace(here, settings=here_settings)
    for change in lineage_changes(there, here, TITLES):
        # With another input its role differs too, which says nothing more.
        if change.field != "roles" or there.parents == here.parents:
            yield _line(TITLES[change.field], change.key, change.before, change.after)
    if theirs.code != ours.code:
        yield _line("", "code", theirs.code, ours.code)
    if (machine := processor()) != bundle.index.processor:
        yield _line("", "processor", bundle.index.processor, machine)


def _portable(lineage: Manifest) -> Manifest:
    """Return a lineage with the models from outside by their digests: their paths differ."""
    outside = sorted(str(digest) for name, digest in lineage.parents.items() if is_path(name))
    stages = {name: digest for name, digest in lineage.parents.items() if not is_path(name)}
    parents: dict[str, Any] = {**stages, "models": outside} if outside else stages
    return replace(lineage, parents=parents)


def _settings(theirs: Tree, ours: Tree) -> tuple[Tree, Tree]:
    """Return two stages' settings without the paths, whose contents have digests."""
    # The bundle has its inputs elsewhere; their contents are compared as `files`.
    places = {
        key
        for key in theirs.keys() & ours.keys()
        if key.rpartition(".")[2] in PLACES
        and all(path is None or is_path(str(path)) for path in (theirs[key], ours[key]))
    }
    there, here = ({k: v for k, v in of.items() if k not in places} for of in (theirs, ours))
    return there, here


def _line(title: str, key: str, there: Any, here: Any) -> str:
    return f"{title} {key}: {json.dumps(there)} in the bundle, {json.dumps(here)} here".strip()
