"""The walks of docs/architecture.md: the files a reader opens from one place to another.

`python -m tools.walks` prints the table; `python -m tools.walks NAME` a walk's files, hop by hop.

A walk of walks.yaml is a list of files in the order a reader opens them. A hop leads from a file to
one that it imports or that imports it, or it crosses from one process to another through a file or
a socket; those are written with their reason, as `{file: PATH, by: REASON}`. The script refuses a
walk with a file that does not exist, or whose file no earlier file of the walk leads to, so that no
file between can be left out. Walks of an earlier revision are checked against that revision.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tools.structure import FLOORS, REPOSITORY, imports

WALKS = Path(__file__).with_suffix(".yaml")


@dataclass(frozen=True)
class Walk:
    """A walk at one revision: its files in the order they are opened, and the hops between them."""

    files: tuple[str, ...]
    hops: int


def check(steps: list[Any], root: Path) -> Walk:
    """Return a walk of a checkout.

    `hops` counts the imports among the walk's files that a reader follows: one for every file of
    the walk and every file of the walk that it imports.

    Raises:
        ValueError: a file does not exist, or no earlier file leads to it.
    """
    graph = imports(root)
    files: list[str] = []
    for step in steps:
        path, reason = (step["file"], step["by"]) if isinstance(step, dict) else (step, None)
        if not (root / path).exists():
            raise ValueError(f"{path}: no such file")
        name = _module(path)
        before = {_module(each) for each in files}
        linked = graph.get(name, frozenset()) & before or any(
            name in graph.get(each, ()) for each in before
        )
        if files and not linked and not reason:
            raise ValueError(f"{path}: no earlier file of the walk imports it or is imported by it")
        if path not in files:
            files.append(path)
    modules = {_module(path) for path in files}
    return Walk(tuple(files), sum(len(graph.get(name, frozenset()) & modules) for name in modules))


def _module(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


def checkout(revision: str, directory: Path) -> Path:
    """Write the floors, the configurations and the scripts of a revision into a directory."""
    names = [*FLOORS, "configs", "slurm"]
    archive = subprocess.run(
        ["git", "archive", revision, *names], cwd=REPOSITORY, capture_output=True, check=True
    )
    subprocess.run(["tar", "-x", "-C", directory], input=archive.stdout, check=True)
    return directory


def rows() -> list[tuple[str, Walk, Walk, int]]:
    """Return every walk's title, the walk before and today, and the most files it should have."""
    described = yaml.safe_load(WALKS.read_text())
    with tempfile.TemporaryDirectory() as directory:
        earlier = checkout(described["before"], Path(directory))
        return [
            (
                walk["title"],
                check(walk["before"], earlier),
                check(walk["now"], REPOSITORY),
                walk["aim"],
            )
            for walk in described["walks"].values()
        ]


def table() -> str:
    """Return the table of docs/architecture.md."""
    lines = ["| walk | files before | now | aim | imports among them before | now |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for title, before, now, aim in rows():
        numbers = (len(before.files), len(now.files), aim, before.hops, now.hops)
        lines.append(f"| {title} | {' | '.join(map(str, numbers))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    walks = yaml.safe_load(WALKS.read_text())["walks"]
    parser.add_argument("walk", nargs="?", choices=walks, help="print this walk of walks.yaml")
    chosen = parser.parse_args().walk
    try:
        print(
            *([table()] if chosen is None else check(walks[chosen]["now"], REPOSITORY).files),
            sep="\n",
        )
    except ValueError as error:
        sys.exit(f"walks.yaml: {error}")
