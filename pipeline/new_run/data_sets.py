"""Data sets on disk, or of the Hugging Face Hub, as the path and the source of a domain's rows.

A data set is a file, a pattern, or a directory in one of the layouts that Hugging Face's `datasets`
knows: files of Parquet or JSON lines whose names or directories have the split (`load_dataset`), or
Arrow files beside state.json, of several splits each in its own directory (`save_to_disk`).
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal

from parallel.errors import UserError, hint
from pipeline.text import shown
from stages.data.settings import FileSettings, TooManyDirectories

HUB = "hf:"  # hf:OWNER/NAME[/DIRECTORY][:SPLIT]
Source = Literal["parquet", "arrow", "jsonl"]
SOURCES: tuple[Source, ...] = ("parquet", "arrow", "jsonl")
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")
SHARD = re.compile(r"([A-Za-z0-9_.]+)-\d{5}-of-\d{5}")  # train_sft-00000-of-00002.parquet
MAGIC = re.compile(r"[*?[]")


def source_of(rows: Path) -> Source:
    """Return the source of a file, a pattern or a directory, by its suffix or that of its files."""
    suffix = rows.suffix.removeprefix(".")
    if suffix in SOURCES:
        return next(source for source in SOURCES if source == suffix)
    if rows.is_dir():
        return next((source for source in SOURCES if _files(source, rows)), "jsonl")
    return "jsonl"


def rows_of(option: str, stated: str) -> Path:
    """Return the file, pattern or directory of a data set: PATH, PATH:SPLIT or hf:NAME:SPLIT.

    `option` is how the user wrote it, for messages.

    Raises:
        UserError: nothing is there, the Hub cannot be reached, or the split is not clear.
    """
    if stated.startswith(HUB):
        name, _, split = stated.removeprefix(HUB).partition(":")
        return _of_split(option, _downloaded(option, name), split)
    path = Path(stated)
    if path.is_dir():
        return _of_split(option, path, "")
    if path.exists():
        return path
    if MAGIC.search(stated):
        if not _files(source_of(path), path):
            raise UserError(f"{option}: no file matches {shown(path)}")
        return path
    directory, colon, split = stated.rpartition(":")
    if colon and split and Path(directory).is_dir():
        return _of_split(option, Path(directory), split)
    raise UserError(f"{option}: no such file: {shown(path)}")


def _of_split(option: str, directory: Path, split: str) -> Path:
    """Return the path, or a pattern, of a directory's files of a split; "": where there is one."""
    directory = directory.absolute()
    try:
        source = source_of(directory)
        files = _files(source, directory)
    except TooManyDirectories as error:
        raise UserError(f"{option}: {shown(directory)} {error}") from error
    if not files:
        kinds = ", ".join(f"*.{kind}" for kind in SOURCES)
        raise UserError(f"{option}: no file of {kinds} in {shown(directory)}")
    below = {file: str(file.relative_to(directory)) for file in files}
    splits = _splits(directory, below.values())
    if not split:
        if len(splits) < 2:
            return directory
        example = f"{option}:{splits[0]}"
        raise UserError(f"{option}: has the splits {', '.join(splits)}; name one: {example}")
    of_split = [file for file, path in below.items() if _word(split).search(path)]
    if not of_split:
        raise UserError(f"{option}: {shown(directory)} has no split {split}; {hint(split, splits)}")
    subsets = sorted({_subset(split, Path(below[file]).parent) for file in of_split})
    if len(subsets) > 1:
        example = f"{directory / subsets[-1]}:{split}"
        raise UserError(f"{option}: has the subsets {', '.join(subsets)}; name one: {example}")
    if (pattern := _pattern(source, of_split, split)) is None:
        raise UserError(
            f"{option}: no pattern matches the files of {split} alone; move them into a directory"
        )
    return pattern


def _splits(directory: Path, paths: Collection[str]) -> list[str]:
    """Return the splits of a directory with files at these paths, those of training first."""
    usual = [name for name in SPLITS if any(_word(name).search(path) for path in paths)]
    shards = [match[1] for path in paths if (match := SHARD.search(path)) and match[1] != "data"]
    several = directory / "dataset_dict.json"  # of save_to_disk, a directory for each split
    saved = [path.parent.name for path in directory.glob("*/state.json") if several.is_file()]
    splits = dict.fromkeys([*usual, *sorted(saved), *shards])
    return sorted(splits, key=lambda split: "train" not in split)  # stable


def _pattern(source: Source, files: Sequence[Path], split: str) -> Path | None:
    """Return a file, directory or pattern that matches these files alone."""
    if len(files) == 1:
        return files[0]
    common = Path(os.path.commonpath(files))
    paths = [common]
    if match := _word(split).search(files[0].name):
        names = f"{glob.escape(files[0].name[: match.end()])}*.{source}"
        paths.append(Path(glob.escape(str(common)), names))
    return next((path for path in paths if _files(source, path) == [*files]), None)


def _files(source: Source, path: Path) -> list[Path]:
    return FileSettings(source=source, path=path.absolute()).files()


def _word(split: str) -> re.Pattern[str]:
    """Return what finds a split in a path as `datasets` does: train-00000, gsm8k_train, train_1."""
    return re.compile(rf"(?<![A-Za-z0-9]){re.escape(split)}(?!_?[A-Za-z])")


def _subset(split: str, directory: Path) -> str:
    """Return the directory of files without the split's own, which a subset of the data set has."""
    return str(Path(*(name for name in directory.parts if not _word(split).fullmatch(name))))


def _downloaded(option: str, name: str) -> Path:
    """Return the directory of a data set of the Hub, in the cache of huggingface_hub.

    Raises:
        UserError: it cannot be downloaded; the message says how to do so elsewhere.
    """
    from huggingface_hub import snapshot_download  # imports for a second

    owner, _, rest = name.partition("/")
    repository, _, directory = rest.partition("/")
    if not owner or not repository:
        raise UserError(f"{option}: write hf:OWNER/NAME, such as hf:openai/gsm8k/main:train")
    data_set = f"{owner}/{repository}"
    below = f"{directory}/" if directory else ""
    patterns = [f"{below}*.{source}" for source in SOURCES]
    arguments: dict[str, Any] = {"repo_type": "dataset", "allow_patterns": patterns}
    try:
        return Path(snapshot_download(data_set, **arguments)) / directory
    except Exception as error:  # of the network, the Hub or the cache
        where = f"DIRECTORY/{directory}" if directory else "DIRECTORY"
        why = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{option}: cannot download {data_set}: {why}; on a machine with a network run hf "
            f"download {data_set} --repo-type dataset --local-dir DIRECTORY, copy DIRECTORY here, "
            f"and name it: {where}:train"
        ) from error
