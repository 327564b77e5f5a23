"""A bundle that is run again: its files are unpacked and checked, and its outputs compared."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from parallel.errors import UserError
from parallel.files import files_digest, read_text, sha256, write_atomically
from pipeline.config.unroll import is_path
from pipeline.run.bundle import (
    ARCHIVES,
    CONFIG,
    FORMAT,
    INDEX,
    data_digest,
    output_digest,
    processor,
    tokenizer_files,
)
from pipeline.run.lineage import Manifest, read_manifest
from pipeline.run.outside import outside_model
from pipeline.run.run import Run
from pipeline.text import shown
from stages.data.settings import FileSettings

MOST_MEMBERS = 1_000_000
UNPACKED = ".archive"  # the SHA-256 of the archive that a directory was unpacked from
Tree = dict[str, Any]


@dataclass(frozen=True)
class BundleInput:
    """An input of a bundled run, with its digest."""

    key: str
    kind: str
    path: str
    copied: bool
    digest: str


@dataclass(frozen=True)
class BundledStage:
    """A stage of a bundled run: its lineage, and the digest of its output."""

    name: str
    kind: str
    state: str
    output: str | None
    lineage: Manifest | None


@dataclass(frozen=True)
class _Index:
    """bundle.json, as far as it is read again."""

    __pydantic_config__ = ConfigDict(extra="ignore")

    format: Annotated[int, Field(ge=1)]
    run: str
    deterministic: bool
    processor: str
    settings: Tree
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
            found = json.loads(read_text(file))
            if isinstance(found, dict) and found.get("format", FORMAT) != FORMAT:
                raise UserError(
                    f"{shown(file)}: format {found['format']}, and this version reads {FORMAT}; "
                    "run it with the version that wrote it"
                )
            return TypeAdapter(_Index).validate_python(found)
        except (ValidationError, ValueError, RecursionError) as error:
            raise UserError(f"{shown(file)}: damaged; bundle the run again") from error

    def check_inputs(self, elsewhere: Mapping[str, Path]) -> None:
        """Raise UserError with every input that is missing or differs from the bundled one.

        `elsewhere` has the paths of inputs, by key, that are given on the command line.
        """
        wrong = [
            line
            for each in self.index.inputs
            if (line := self._wrong(each, elsewhere.get(each.key)))
        ]
        if wrong:
            title = f"{shown(self.path)}: the bundle's inputs are not the ones of its run:"
            raise UserError("\n".join([title, *(f"  {line}" for line in wrong)]))

    def _wrong(self, each: BundleInput, elsewhere: Path | None) -> str | None:
        """Return what is wrong with an input; None where its content is the bundled one."""
        path = elsewhere or (self.path / each.path if each.copied else Path(each.path))
        name = f"{each.key}: {shown(path)}"
        if (
            each.copied
            and elsewhere is None
            and not path.resolve().is_relative_to(self.path.resolve())
        ):
            return f"{name}: outside the bundle; bundle the run again"
        if (found := _digest(each, path)) is None:
            return f"{name}: missing; restore it, or name its copy with {each.key}=PATH"
        return None if found == each.digest else f"{name}: its content differs; restore it"


def _digest(each: BundleInput, path: Path) -> str | None:
    if each.kind == "jsonl" or each.kind == "parquet":
        return data_digest(FileSettings(source=each.kind, path=path.absolute())) or None
    if each.kind == "tokenizer":
        return files_digest(tokenizer_files(path), whole=True)
    model = outside_model(path)
    return model.digest if model else None


def bundle_at(path: Path) -> Bundle | None:
    """Return the bundle in a directory or an archive, which is unpacked beside it; else None.

    Raises:
        UserError: an archive that no `braid bundle` has written, or that is damaged.
    """
    if (path / INDEX).is_file():
        return Bundle(path)
    if path.name.endswith(ARCHIVES) and path.is_file():
        return Bundle(_unpacked(path))
    if path.is_dir():
        raise UserError(f"{shown(path)}: neither a configuration nor a bundle: no {INDEX} in it")
    return None


def _unpacked(archive: Path) -> Path:
    """Unpack an archive into the directory of its name beside it, unless it was before."""
    name = next(archive.name.removesuffix(end) for end in ARCHIVES if archive.name.endswith(end))
    to, digest = archive.with_name(name), sha256(archive)
    if to.exists():
        mark = to / UNPACKED
        if mark.is_file() and read_text(mark).strip() == digest:
            return to
        raise UserError(
            f"{shown(to)} exists and is not unpacked from {shown(archive)}; move it away, or run it"
        )
    unfinished = to.with_name(f".{name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(mode=0o700)
    try:
        with tarfile.open(archive, "r:gz") as packed:
            for count, member in enumerate(packed):
                _unpack(packed, member, unfinished, archive, count)
        if not (unfinished / INDEX).is_file():
            raise UserError(f"{shown(archive)}: not a bundle: no {INDEX} in it")
        write_atomically(unfinished / UNPACKED, f"{digest}\n")
        unfinished.rename(to)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UserError(f"{shown(archive)}: cannot be unpacked: {error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return to


def _unpack(
    packed: tarfile.TarFile, member: tarfile.TarInfo, to: Path, archive: Path, count: int
) -> None:
    """Write one member; raise UserError for all that `braid bundle` never writes."""
    where = f"{shown(archive)}: {member.name!r}"
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in member.name:
        raise UserError(f"{where}: a path outside the bundle; it is refused")
    if not member.isreg():
        raise UserError(f"{where}: not a regular file; links and devices are refused")
    if count >= MOST_MEMBERS:
        raise UserError(f"{where}: more than {MOST_MEMBERS} files; it is refused")
    target = to / path
    target.parent.mkdir(parents=True, exist_ok=True)
    source = packed.extractfile(member)
    assert source is not None
    with source, target.open("xb") as file:  # a second member of the name fails
        shutil.copyfileobj(source, file)


def compare(bundle: Bundle, run: Run) -> list[str]:
    """Return the comparison of a run's outputs with a bundle's, in words.

    Raises:
        UserError: an output differs, or is missing; the message names the first such stage and
            what differs in its lineage.
    """
    index = bundle.index
    if not index.deterministic:
        why = "its run is not deterministic: true, so equal digests cannot be expected"
        return [f"{shown(bundle.path)}: not compared: {why}"]
    bundled = {each.name: each for each in index.stages if each.output is not None}
    known = {stage.name for stage in run.stages}
    if absent := [name for name in bundled if name not in known]:
        raise UserError(f"{shown(run.path)} has no stage {absent[0]}, which the bundle has")
    compared = [stage for stage in run.stages if stage.name in bundled]  # in the graph's order
    for number, stage in enumerate(compared):
        directory, theirs = run.stage(stage.name), bundled[stage.name]
        ours = output_digest(stage, directory)
        if ours == theirs.output:
            continue
        what = "has no output yet" if ours is None else "differs from the bundle's"
        causes = [*_differences(bundle, theirs.lineage, read_manifest(directory))]
        none = "nothing recorded differs: the same inputs, settings, code, versions and processor"
        raise UserError(
            "\n  ".join(
                [
                    f"{shown(run.path)}: {stage.name} is the first stage that {what}; "
                    f"{number} of {len(compared)} before it are equal",
                    *(causes or [none]),
                ]
            )
        )
    return [f"{shown(run.path)}: the output of all {len(compared)} stages equals the bundle's"]


def _differences(bundle: Bundle, theirs: Manifest | None, ours: Manifest | None) -> Iterator[str]:
    """Yield what differs between two lineages of a stage."""
    if theirs is None or ours is None:
        yield "its manifest.json is missing"
        return
    paths = {each.key for each in bundle.index.inputs}  # the same content, elsewhere
    settings = [
        {key: value for key, value in each.settings.items() if key not in paths}
        for each in (theirs, ours)
    ]
    machine = [
        {"code": each.code, "processor": which}
        for each, which in ((theirs, bundle.index.processor), (ours, processor()))
    ]
    named: list[tuple[str, Mapping[str, Any], Mapping[str, Any]]] = [
        ("input", _inputs(theirs), _inputs(ours)),
        ("files of", theirs.files, ours.files),
        ("setting", settings[0], settings[1]),
        ("layout", theirs.layout, ours.layout),
        ("version of", theirs.versions, ours.versions),
        ("", machine[0], machine[1]),
    ]
    for title, there, here in named:
        yield from _pairs(title, there, here)


def _inputs(lineage: Manifest) -> dict[str, Any]:
    """Return the digests of a stage's inputs; of models from outside wherever they are."""
    outside = sorted(str(each) for name, each in lineage.parents.items() if is_path(name))
    own = {name: each for name, each in lineage.parents.items() if not is_path(name)}
    return {**own, "models": outside} if outside else own


def _pairs(title: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    for key in dict.fromkeys([*there, *here]):
        if there.get(key) != here.get(key):
            was, now = (json.dumps(each.get(key)) for each in (there, here))
            yield f"{title} {key}: {was} in the bundle, {now} here".strip()
