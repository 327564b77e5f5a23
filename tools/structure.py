"""The structure of the three floors, read from their imports: depths, circles, names.

`python -m tools.structure [--root DIRECTORY]` prints the numbers of docs/architecture.md.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
FLOORS = ("pipeline", "stages", "parallel")

Imports = Mapping[str, frozenset[str]]


def imports(root: Path = REPOSITORY) -> dict[str, frozenset[str]]:
    """Return the modules of the floors, and which of the floors' modules each one imports.

    An import anywhere in a module counts: in a function and for type checkers as well.
    """
    paths = {_name(path, root): path for floor in FLOORS for path in (root / floor).rglob("*.py")}
    return {name: frozenset(_imported(path, set(paths)) - {name}) for name, path in paths.items()}


def _name(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def _imported(path: Path, known: set[str]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & known
            found |= submodules or {node.module}
    return found & known


def circles(graph: Imports) -> list[list[str]]:
    """Return one circle of imports of every group of modules that has one."""
    remaining, found = dict(graph), []
    while True:
        try:
            TopologicalSorter(remaining).prepare()
        except CycleError as error:
            found.append(error.args[1])
            remaining = {name: remaining[name] for name in remaining if name not in error.args[1]}
        else:
            return found


def rooms(graph: Imports) -> dict[str, frozenset[str]]:
    """Return the imports between the rooms of a floor: the directories one level below it.

    Modules that stand beside the rooms belong to none.
    """
    room = {name: ".".join(name.split(".")[:2]) for name in graph if name.count(".") >= 2}
    found: dict[str, set[str]] = {each: set() for each in room.values()}
    for name, imported in graph.items():
        for other in imported:
            same_floor = name.partition(".")[0] == other.partition(".")[0]
            if same_floor and name in room and other in room and room[name] != room[other]:
                found[room[name]].add(room[other])
    return {name: frozenset(others) for name, others in found.items()}


def depth(graph: Imports, floor: str) -> int:
    """Return the number of modules in a floor's longest chain of imports. The graph has no circle.

    A package's own `__init__` is not counted: it only holds the package.
    """

    @cache
    def of(name: str) -> int:
        below = [of(each) for each in graph[name] if each.startswith(f"{floor}.")]
        return 1 + max(below, default=0)

    return max(of(name) for name in graph if name.startswith(f"{floor}."))


def duplicate_classes(root: Path = REPOSITORY) -> dict[str, int]:
    """Return the names that several classes of the floors have, and how many classes each."""
    found = Counter(
        node.name
        for floor in FLOORS
        for path in (root / floor).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    return {name: count for name, count in found.items() if count > 1}


def lines(root: Path, floor: str) -> int:
    """Return the number of lines of a floor's source, with comments and blank lines."""
    return sum(len(path.read_text().splitlines()) for path in (root / floor).rglob("*.py"))


def report(root: Path) -> Iterator[str]:
    """Yield the lines that `python -m tools.structure` prints."""
    graph = imports(root)
    found = circles(graph)
    for floor in FLOORS:
        own = [path for path in (root / floor).rglob("*.py") if path.stem != "__init__"]
        deep = "has circles" if found else f"{depth(graph, floor)} imports deep"
        yield f"{floor}: {len(own)} modules, {lines(root, floor)} lines, {deep}"
    yield f"circles of modules: {len(found)} {found or ''}"
    between = circles(rooms(graph))
    yield f"circles of rooms: {len(between)} {between or ''}"
    duplicates = duplicate_classes(root)
    yield f"names of several classes: {len(duplicates)} {duplicates or ''}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=REPOSITORY, help="a checkout to read")
    print(*report(parser.parse_args().root), sep="\n")
