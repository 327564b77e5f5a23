"""A bundle of a run: all that a second machine needs to reproduce it, in one directory or archive.

bundle.json has the digests of every input and of every stage's output; config.yaml names the copied
inputs relative to the bundle, and the others by their absolute paths.
"""

from __future__ import annotations

import json
import platform
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from parallel.errors import UserError
from parallel.files import HUGGING_FACE, WEIGHTS, files_digest, read_text, write_atomically
from parallel.settings import CHARACTERS
from pipeline.config.unroll import is_path
from pipeline.config.yaml_core import dump
from pipeline.run.graph import Stage, digest
from pipeline.run.ledger import Event
from pipeline.run.lineage import TOKENIZER_FILES, read_manifest
from pipeline.run.outside import outside_model
from pipeline.run.run import Run, read_verdict
from pipeline.text import shown
from stages.data.settings import FileSettings
from stages.directory import StageDirectory

FORMAT = 1
INDEX, CONFIG = "bundle.json", "config.yaml"
ARCHIVES = (".tar.gz", ".tgz")
Weights = Literal["reference", "copy"]
Tree = dict[str, Any]
MAGIC = "*?["  # of a pattern of files


def write_bundle(run: Run, to: Path, weights: Weights) -> Path:
    """Write the bundle of a run as a directory, or as an archive where `to` is named like one.

    Raises:
        UserError: `to` exists, or an input of the run is missing.
    """
    if to.exists():
        raise UserError(f"{shown(to)} exists; choose another path with --to")
    archive = to.name.endswith(ARCHIVES)
    unfinished = to.with_name(f".{to.name}.unfinished")  # complete bundles alone have the name
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        _fill(run, unfinished, weights)
        if archive:
            packed = unfinished.with_name(f"{unfinished.name}.tar.gz")
            _pack(unfinished, packed)
            packed.rename(to)
        else:
            unfinished.rename(to)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return to


def _fill(run: Run, directory: Path, weights: Weights) -> None:
    tree: Tree = run.settings.model_dump(mode="json")
    inputs = [*_data(run, tree, directory), *_tokenizer(tree, directory)]
    inputs += _models(tree, directory, weights)
    write_atomically(directory / CONFIG, dump(tree))
    index = {
        "format": FORMAT,
        "run": run.settings.name,
        "deterministic": run.settings.deterministic,
        "processor": processor(),
        "settings": run.settings.model_dump(mode="json"),
        "routing": {each.name: each.teachers for each in run.stages if each.teachers},
        "inputs": inputs,
        "secrets": [*_secrets(tree)],
        "stages": [_stage(run, stage) for stage in run.stages],
        "decisions": [*_decisions(run)],
        "commands": [*_commands(run)],
    }
    write_atomically(directory / INDEX, json.dumps(index, indent=2) + "\n")


def _input(key: str, kind: str, path: str, copied: bool, found: str) -> Tree:
    return {"key": key, "kind": kind, "path": path, "copied": copied, "digest": found}


def _data(run: Run, tree: Tree, directory: Path) -> Iterator[Tree]:
    """Copy the data files of every domain; yield their digests."""
    for domain, settings in run.settings.domains.items():
        for block in ("prompts", "demonstrations"):
            source = getattr(settings, block)
            if not isinstance(source, FileSettings):
                continue
            key = f"domains.{domain}.{block}.path"
            files = source.files()
            if not files:
                raise UserError(f"{key}: {shown(source.path)}: no such file; restore it")
            root, rest = _split(source.path)
            inside = Path("data") / f"{domain}.{block}"
            for file in files:
                _copy(file, directory / inside / file.relative_to(root))
            relative = str(inside / rest)
            tree["domains"][domain][block]["path"] = relative
            yield _input(key, source.source, relative, True, data_digest(source))


def _split(path: Path) -> tuple[Path, Path]:
    """Return the directory that holds all files of a path or pattern, and the rest of it."""
    if path.is_dir():
        return path, Path()
    parts = path.parts
    fixed = next((n for n, part in enumerate(parts) if set(part) & set(MAGIC)), len(parts) - 1)
    fixed = len(parts) - 1 if path.is_file() else fixed
    return Path(*parts[:fixed]), Path(*parts[fixed:])


def data_digest(source: FileSettings) -> str:
    """Return the digest of all bytes of a source's files; empty where there are none."""
    return files_digest(source.files(), whole=True) or ""


def tokenizer_files(directory: Path) -> list[Path]:
    """Return the files of a tokenizer in a directory that may hold a whole model."""
    return sorted({file for name in TOKENIZER_FILES for file in directory.glob(name)})


def _tokenizer(tree: Tree, directory: Path) -> Iterator[Tree]:
    path = tree["model"]["tokenizer"]
    if path == CHARACTERS:
        return
    source, key = Path(path), "model.tokenizer"
    files = tokenizer_files(source)
    found = files_digest(files, whole=True)
    if found is None:
        raise UserError(f"{key}: {shown(source)}: no tokenizer there; restore it")
    # transformers chooses the tokenizer's class by config.json where the tokenizer names none.
    for file in [*files, *source.glob(HUGGING_FACE)]:
        _copy(file, directory / "tokenizer" / file.relative_to(source))
    tree["model"]["tokenizer"] = "tokenizer"
    yield _input(key, "tokenizer", "tokenizer", True, found)


def _models(tree: Tree, directory: Path, weights: Weights) -> Iterator[Tree]:
    """Yield the models from outside the run, copied where `weights` says so."""
    numbers: dict[str, str] = {}

    def settled(path: str) -> str:
        if weights == "reference":
            return path
        if path not in numbers:
            numbers[path] = _copied_model(Path(path), directory, len(numbers))
        return numbers[path]

    def visit(holder: Any, name: Any, key: str) -> Iterator[Tree]:
        value = holder[name]
        if isinstance(value, str) and is_path(value):
            found = outside_model(Path(value))
            if found is None:
                raise UserError(f"{key}: {value}: no model there; restore it")
            holder[name] = settled(value)
            copied = weights == "copy"
            yield _input(key, "model", holder[name], copied, found.digest)
        elif isinstance(value, dict | list):
            names = list(value) if isinstance(value, dict) else range(len(value))
            for each in names:
                yield from visit(value, each, f"{key}.{each}")

    if tree["model"]["initial_weights"]:
        yield from visit(tree["model"], "initial_weights", "model.initial_weights")
    for block, stated in tree["stages"].items():
        for name in ("from", "teachers", "models", "data"):
            if stated.get(name):
                yield from visit(stated, name, f"stages.{block}.{name}")


def _copied_model(path: Path, directory: Path, number: int) -> str:
    """Copy a model into the bundle; return its path there."""
    found = outside_model(path)
    assert found is not None
    inside = Path("weights") / str(number) / found.path.name
    if found.files or not (path / HUGGING_FACE).is_file():
        shutil.copytree(found.path, directory / inside)
    else:
        names = [*WEIGHTS, *TOKENIZER_FILES, "generation_config.json"]
        for file in sorted({file for name in names for file in path.glob(name)}):
            _copy(file, directory / inside / file.relative_to(path))
    return str(inside)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)  # the content alone, of a link too


def _secrets(tree: Tree) -> Iterator[Tree]:
    """Yield the files of keys, which are named and never copied."""
    for domain, settings in tree["domains"].items():
        for name, reward in settings["rewards"].items():
            if reward.get("api_key_file"):
                key = f"domains.{domain}.rewards.{name}.api_key_file"
                yield {"key": key, "path": reward["api_key_file"]}


def _stage(run: Run, stage: Stage) -> Tree:
    directory = run.stage(stage.name)
    manifest = read_manifest(directory)
    return {
        "name": stage.name,
        "kind": stage.kind,
        "state": run.states[stage.name].state,
        "output": output_digest(stage, directory),
        "lineage": asdict(manifest) if manifest else None,
    }


def output_digest(stage: Stage, directory: StageDirectory) -> str | None:
    """Return the digest of what a stage left: weights, samples, results or an export."""
    if stage.measures:
        try:
            models = json.loads(read_text(directory.results))["models"]
        except (OSError, ValueError, RecursionError, KeyError, TypeError):
            return None
        verdict = read_verdict(directory) if stage.kind == "gate" else None
        return digest([models, asdict(verdict) if verdict else None])
    if stage.declared.leaves == "export":
        return files_digest(directory.exported.rglob("*"), whole=True)
    found = directory.output()
    return found.digest if found else None


def _decisions(run: Run) -> Iterator[Tree]:
    """Yield the lines of the ledger that say why a stage ended early, or what a gate decided."""
    gates = {stage.name for stage in run.stages if stage.kind == "gate"}
    for line, event in run.ledger.numbered():
        if _decides(event, event.stage in gates):
            yield {"line": line, **asdict(event)}


def _decides(event: Event, gate: bool) -> bool:
    judged = gate and event.state in ("done", "failed")
    return judged or (event.state == "done" and event.cause not in ("", "finished"))


def _commands(run: Run) -> Iterator[str]:
    yield "braid run BUNDLE"
    for event in run.events:
        if event.state == "done" and event.cause.startswith("overridden: "):
            yield f"braid gate override {run.settings.name} {event.stage} --reason ..."
            yield f"braid resume {run.settings.name}"
    yield f"braid bundle --check {run.settings.name} BUNDLE"


def processor() -> str:
    """Return the model of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _pack(directory: Path, archive: Path) -> None:
    """Write a directory's files as an archive, without their owners, modes and times."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = info.mtime = 0
        info.uname = info.gname = ""
        info.mode = 0o700 if info.isdir() else 0o600
        return info

    with tarfile.open(archive, "w:gz", compresslevel=6) as packed:
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                packed.add(path, str(path.relative_to(directory)), recursive=False, filter=plain)
