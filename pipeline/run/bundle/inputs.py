"""The inputs of a bundled run: what is copied, what is named, and the digest of each."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from parallel.errors import UserError
from parallel.files import GENERATION, HUGGING_FACE, WEIGHTS, Checkpoint, files_digest, sha256
from parallel.settings import CHARACTERS
from pipeline.config.modules import module_files
from pipeline.config.read import Key
from pipeline.config.unroll import REFERENCES, is_path
from pipeline.run.graph import Stage
from pipeline.run.lineage import TOKENIZER, TOKENIZER_FILES, code_digest
from pipeline.run.outside import outside_model
from pipeline.text import shown, visible
from stages.data.settings import FileSettings
from stages.directory import COLLECTION

INITIAL: Key = ("model", "initial_weights")
MAGIC = "*?["  # of a pattern of files
Weights = Literal["reference", "copy"]
Files = Literal["jsonl", "parquet", "arrow"]
Tree = dict[str, Any]
Stages = Sequence[Stage]  # of a run, in the order they run
DATA: tuple[Key, ...] = (
    *(("domains", "*", block) for block in ("prompts", "demonstrations")),
    ("stages", "*", "data", "*"),
)
REWARDS: Key = ("domains", "*", "rewards", "*")


@dataclass(frozen=True)
class BundleInput:
    """An input of a bundled run, with its digest.

    `readers` are the stages that read it, in the order they run. `path` is relative to the bundle
    where the input is `copied`. `function` is that of the reward whose code this is.
    """

    key: str
    kind: Literal["jsonl", "parquet", "arrow", "tokenizer", "model", "code"]
    path: str
    copied: bool
    digest: str
    readers: tuple[str, ...] = ()
    function: str | None = None


def copy_inputs(
    stages: Stages, tree: Tree, directory: Path, weights: Weights
) -> Iterator[BundleInput]:
    """Copy a run's inputs into a bundle; yield each, and write its new path into `tree`.

    `tree` has the run's settings, with absolute paths.

    Raises:
        UserError: an input is missing.
    """
    yield from _data(stages, tree, directory)
    yield from _code(stages, tree, directory)
    yield from _tokenizer(stages, tree, directory)
    yield from _models(stages, tree, directory, weights)


def input_digest(bundled: BundleInput, path: Path | None) -> str | None:
    """Return the digest of an input at a path; None where nothing is there.

    The path of a reward's code is the directory that its module is imported from; without one it is
    imported as by a stage.
    """
    if bundled.function is not None:
        return code_digest(bundled.function, path)
    if path is None:
        return None
    if bundled.kind in get_args(Files):
        settings = FileSettings.model_validate({"source": bundled.kind, "path": path.absolute()})
        return files_digest(settings.files(), whole=True)
    if bundled.kind == "tokenizer":
        return files_digest(_tokenizer_files(path), whole=True)
    return _model_digest(outside_model(path))


def _model_digest(checkpoint: Checkpoint | None) -> str | None:
    """Return the digest of a model; of collected responses by their bytes, which nothing checks."""
    if checkpoint is not None and checkpoint.path.is_file():
        return sha256(checkpoint.path)
    return checkpoint.digest if checkpoint else None


def holders(tree: Tree, pattern: Key) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, what holds it, its name or index) of every value that a pattern names.

    Of a list every element.
    """
    blocks: list[tuple[str, Any]] = [("", tree)]
    *above, last = pattern
    for step in above:
        blocks = [
            (f"{key}{name}.", value[name])
            for key, value in blocks
            if isinstance(value, dict)
            for name in (value if step == "*" else [step])
            if name in value
        ]
    for key, value in blocks:
        for name in (list(value) if last == "*" else [last]) if isinstance(value, dict) else ():
            if isinstance(value.get(name), list):
                yield from ((f"{key}{name}.{n}", value[name], n) for n in range(len(value[name])))
            elif name in value:
                yield f"{key}{name}", value, name


def _readers(stages: Stages, key: str) -> tuple[str, ...]:
    """Return the stages that read a key of the run."""
    keys = {stage.name: key.removeprefix(f"stages.{stage.block}.") for stage in stages}
    return tuple(stage.name for stage in stages if keys[stage.name] in stage.reads)


def _data(stages: Stages, tree: Tree, directory: Path) -> Iterator[BundleInput]:
    """Copy the data files of every domain and stage."""
    for pattern in DATA:
        for key, holder, name in holders(tree, pattern):
            block = holder[name]
            kind: Any = block.get("source") if isinstance(block, dict) else None
            if kind not in get_args(Files):
                continue
            readers = _readers(stages, f"{key}.path")
            source = FileSettings.model_validate({"source": kind, "path": Path(block["path"])})
            files = source.files()
            if not files and not readers:  # such as demonstrations that no stage trains on
                continue
            if not files:
                raise UserError(f"{key}.path: {shown(source.path)}: no such file; restore it")
            root, pattern_below = _split(source.path)
            inside = Path("data") / key.removeprefix("domains.")
            for file in files:
                _copy(file, directory / inside / file.relative_to(root))
            block["path"] = str(inside / pattern_below)
            yield _with_digest(
                BundleInput(f"{key}.path", kind, block["path"], True, "", readers), directory
            )


def _with_digest(copied: BundleInput, directory: Path) -> BundleInput:
    """Return a copied input with the digest of its copy."""
    digest = input_digest(copied, directory / copied.path)
    assert digest is not None, f"{copied.key} was copied to {copied.path}"
    return replace(copied, digest=digest)


def _split(path: Path) -> tuple[Path, Path]:
    """Return the directory that holds all files of a path or pattern, and the rest of it."""
    if path.is_dir():
        return path, Path()
    names = path.parts
    fixed = next((n for n, name in enumerate(names) if set(name) & set(MAGIC)), len(names) - 1)
    fixed = len(names) - 1 if path.is_file() else fixed
    return Path(*names[:fixed]), Path(*names[fixed:])


def _code(stages: Stages, tree: Tree, directory: Path) -> Iterator[BundleInput]:
    """Copy the modules of Python rewards, except those of installed packages."""
    # Modules of one directory import each other, so they stay together.
    roots: dict[Path, str] = {}  # by the directory that modules are imported from
    for key, holder, name in holders(tree, REWARDS):
        reward = holder[name]
        if reward["kind"] != "python":
            continue
        where = Path(reward["path"]) if reward["path"] else None
        module = reward["function"].partition(":")[0]
        readers = _readers(stages, f"{key}.function")
        if (modules := module_files(module, where)) is None:
            if readers and where is None and find_spec(module.partition(".")[0]) is None:
                raise UserError(
                    f"{key}.function: no module {module}; set PYTHONPATH as for the run, or"
                    f" {key}.path to the directory that it is imported from"
                )
            continue  # compiled
        inside = roots.setdefault(modules.root, f"code/{len(roots)}")
        copied = not modules.installed
        bundled = BundleInput(
            f"{key}.path",
            "code",
            inside if copied else "",
            copied,
            code_digest(reward["function"], where) or "",
            readers,
            function=reward["function"],
        )
        if copied:
            for file in modules.files:
                _copy(file, directory / inside / file.relative_to(modules.root))
            reward["path"] = inside
            bundled = _with_digest(bundled, directory)
        yield bundled


def _tokenizer_files(directory: Path) -> list[Path]:
    """Return the files of a tokenizer in a directory that may hold a whole model."""
    return sorted({file for name in TOKENIZER_FILES for file in directory.glob(name)})


def _tokenizer(stages: Stages, tree: Tree, directory: Path) -> Iterator[BundleInput]:
    path = tree["model"]["tokenizer"]
    if path == CHARACTERS:
        return
    source = Path(path)
    if not (files := _tokenizer_files(source)):
        raise UserError(f"{TOKENIZER}: {shown(source)}: no tokenizer there; restore it")
    # transformers chooses the tokenizer's class by config.json where the tokenizer names none, and
    # generation_config.json has further end tokens.
    for file in [*files, *source.glob(HUGGING_FACE), *source.glob(GENERATION)]:
        _copy(file, directory / "tokenizer" / file.relative_to(source))
    tree["model"]["tokenizer"] = "tokenizer"
    readers = _readers(stages, TOKENIZER)
    copied = BundleInput(TOKENIZER, "tokenizer", "tokenizer", True, "", readers)
    yield _with_digest(copied, directory)


def _models(stages: Stages, tree: Tree, directory: Path, weights: Weights) -> Iterator[BundleInput]:
    """Yield the models from outside the run, copied where `weights` says so."""
    copies: dict[str, str] = {}  # paths in the bundle by the stated ones
    for pattern in (INITIAL, *REFERENCES):
        for key, holder, name in list(holders(tree, pattern)):
            stated = holder[name]
            for path in [*stated] if isinstance(stated, dict) else [stated]:
                if not isinstance(path, str) or not is_path(path):
                    continue
                checkpoint = outside_model(Path(path))
                if (digest := _model_digest(checkpoint)) is None or checkpoint is None:
                    raise UserError(f"{key}: {visible(path)}: no model there; restore it")
                if weights == "copy" and path not in copies:
                    copies[path] = f"weights/{len(copies)}"
                    _copy_model(Path(path), checkpoint, directory / copies[path])
                at = copies.get(path, path)
                readers = tuple(stage.name for stage in stages if path in stage.sources)
                readers = readers or _readers(stages, key)
                yield BundleInput(key, "model", at, path in copies, digest, readers)
            if isinstance(stated, dict):  # weights of teachers, by model
                holder[name] = {copies.get(path, path): weight for path, weight in stated.items()}
            elif isinstance(stated, str):
                holder[name] = copies.get(stated, stated)


def _copy_model(path: Path, checkpoint: Checkpoint, target: Path) -> None:
    """Copy a model so that `outside_model` finds it at the target."""
    if checkpoint.path.is_file():  # collected responses
        for file in (checkpoint.path, path / COLLECTION):
            _copy(file, target / file.name)
    elif checkpoint.files or not (path / HUGGING_FACE).is_file():
        shutil.copytree(checkpoint.path, target / "checkpoints" / checkpoint.path.name)
    else:
        names = [*WEIGHTS, *TOKENIZER_FILES, GENERATION]
        for file in sorted({file for name in names for file in path.glob(name)}):
            _copy(file, target / file.relative_to(path))


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)  # the content alone, of a link too
